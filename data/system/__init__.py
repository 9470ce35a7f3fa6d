"""The machine beneath: its files, folders, processes, threads and memory, and the log."""
