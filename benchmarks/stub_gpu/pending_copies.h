/* Copies between page-locked memory and the device that are under way until the host waits for them.
 *
 * Until then, what a copy writes on the host cannot be read, and what it reads there cannot be written: the process gets
 * SIGSEGV, and Python's faulthandler prints the line. On a GPU, such a line would only sometimes see wrong numbers.
 * stub.c includes this file after `on_device`.
 */

#define PAGE 4096ul
#define LOCKED 65536
#define PENDING 4096 /* then the oldest copy is completed, as a device gets there without being waited for */
#define STREAMS 8    /* that one copy is known to; streams after these are not remembered */
#define ALL 1

static struct { char *start; size_t size; int whole_pages; } locked[LOCKED]; /* page-locked memory */
static int locked_count;

struct place { void *stream; long number; }; /* what was given to a stream up to a moment */
struct copy {
  char *to, *data; /* data: what arrives on the host; NULL if it is too large to be copied */
  size_t size;
  char *pages;
  size_t pages_size;
  int to_host, streams;
  struct place known[STREAMS]; /* who has waited for one of these places has waited for the copy */
};
static struct copy pending[PENDING];
static int pending_count;
static long moment; /* numbers all copies and events */
static pthread_mutex_t pending_lock = PTHREAD_MUTEX_INITIALIZER;

static void add_locked(void *start, size_t size, int whole_pages) {
  pthread_mutex_lock(&pending_lock);
  if (locked_count < LOCKED) {
    locked[locked_count].start = start;
    locked[locked_count].size = size;
    locked[locked_count++].whole_pages = whole_pages;
  }
  pthread_mutex_unlock(&pending_lock);
}

static size_t remove_locked(void *start) { /* its size */
  size_t size = 0;
  pthread_mutex_lock(&pending_lock);
  for (int i = 0; i < locked_count; i++)
    if (locked[i].start == start) {
      size = locked[i].size;
      locked[i] = locked[--locked_count];
      break;
    }
  pthread_mutex_unlock(&pending_lock);
  return size;
}

/* The pages of a copy's host memory that nothing else uses; 0 if it is not page-locked. */
static int find_pages(char *host, size_t size, char **pages, size_t *pages_size) {
  for (int i = 0; i < locked_count; i++) {
    if (host < locked[i].start || host + size > locked[i].start + locked[i].size) continue;
    size_t outside = locked[i].whole_pages ? 0 : PAGE - 1; /* of memory that was locked later, inner pages only */
    size_t begin = ((size_t)host + outside) & -PAGE, end = ((size_t)host + size + PAGE - 1 - outside) & -PAGE;
    *pages = (char *)begin;
    *pages_size = end > begin ? end - begin : 0;
    return 1;
  }
  return 0;
}

static int is_locked(const void *address) {
  char *pages;
  size_t size;
  pthread_mutex_lock(&pending_lock);
  int found = find_pages((char *)address, 1, &pages, &size);
  pthread_mutex_unlock(&pending_lock);
  return found;
}

static void protect(const struct copy *copy) {
  mprotect(copy->pages, copy->pages_size, copy->to_host ? PROT_NONE : PROT_READ);
}

static void complete(int number) { /* with the lock */
  struct copy *copy = &pending[number];
  mprotect(copy->pages, copy->pages_size, PROT_READ | PROT_WRITE);
  if (copy->to_host && copy->data) memcpy(copy->to, copy->data, copy->size);
  else if (copy->to_host) memset(copy->to, 0, copy->size);
  free(copy->data);
  memmove(copy, copy + 1, (--pending_count - number) * sizeof *copy);
}

static int is_known(const struct copy *copy, struct place until) {
  for (int i = 0; i < copy->streams; i++)
    if (copy->known[i].stream == until.stream && copy->known[i].number <= until.number) return 1;
  return 0;
}

/* The host has waited for a place, or for everything. */
static void waited_for(struct place until, int all) {
  pthread_mutex_lock(&pending_lock);
  for (int i = pending_count - 1; i >= 0; i--)
    if (all || is_known(&pending[i], until)) complete(i);
  for (int i = 0; i < pending_count; i++) protect(&pending[i]); /* others on the same pages are still under way */
  pthread_mutex_unlock(&pending_lock);
}

static int is_pending(struct place until) {
  int found = 0;
  pthread_mutex_lock(&pending_lock);
  for (int i = 0; i < pending_count && !found; i++) found = is_known(&pending[i], until);
  pthread_mutex_unlock(&pending_lock);
  return found;
}

static struct place place_of(void *stream) {
  return (struct place){stream, __atomic_add_fetch(&moment, 1, __ATOMIC_RELAXED)};
}

/* What is given to a stream from now on comes after a place of another one. */
static void comes_after(void *stream, struct place before) {
  struct place from_now_on = place_of(stream);
  pthread_mutex_lock(&pending_lock);
  for (int i = 0; i < pending_count; i++)
    if (pending[i].streams < STREAMS && is_known(&pending[i], before) && !is_known(&pending[i], from_now_on))
      pending[i].known[pending[i].streams++] = from_now_on;
  pthread_mutex_unlock(&pending_lock);
}

/* Whether a copy is of this kind. Bytes reach the device at once, and the host when it has waited. */
static int begin_copy(void *to, const void *from, size_t size, void *stream) {
  struct copy new = {.to = to, .size = size, .to_host = !on_device(to), .known = {place_of(stream)}, .streams = 1};
  if (!size || new.to_host != on_device(from)) return 0;
  pthread_mutex_lock(&pending_lock);
  int known = find_pages(new.to_host ? to : (void *)from, size, &new.pages, &new.pages_size);
  if (known) {
    if (size <= COPIED && new.to_host) memcpy(new.data = malloc(size), from, size);
    if (size <= COPIED && !new.to_host) memcpy(to, from, size);
    if (pending_count == PENDING) complete(0);
    pending[pending_count++] = new;
    protect(&new);
  }
  pthread_mutex_unlock(&pending_lock);
  return known;
}
