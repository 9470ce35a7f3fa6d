"""Decodes stored images to upright RGB and rejects samples that do not fit, with the reason."""

import io
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import ExifTags, Image

from data.sources import jpeg
from data.sources.base import DecodedSample, Rejected, Sample, brief
from data.sources.captions import CaptionRules, without_surrogates
from data.system.errors import WrongResult, is_raised, noted, one_line

# Formats that are read. Pillow knows more, but some of them start other programs on the data (EPS runs Ghostscript).
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")

# Pillow refuses to open anything larger (twice its MAX_IMAGE_PIXELS).
PILLOW_MAX_PIXELS = 2 * 89_478_485

# A JPEG can be decoded at 1 / one of them of its size.
JPEG_SCALES = (1, 2, 4, 8)

# It is decoded at 1/2, 1/4 or 1/8 only if its sides keep this many times the pixels that a crop needs.
# The last step is then a bicubic resampling, and no difference to full decoding is visible (PSNR over 40 dB).
JPEG_MARGIN = 2

# By EXIF orientation: upright pixels of those that are stored.
_UPRIGHT = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: np.rot90(pixels),
}


class Filter:
    """Decodes samples and rejects those that do not fit. The cheap checks (caption, size) come before decoding.

    Attributes:
        version: of the rules: another number where the same arguments reject other samples than before. Jobs that were
            begun with another one are refused.
    """

    version = 1

    def __init__(
        self,
        *,
        min_side: int = 1,
        max_pixels: int = 89_000_000,
        min_aspect: float | None = None,
        max_aspect: float | None = None,
        min_caption_chars: int = 1,
        max_caption_chars: int | None = None,
        min_caption_words: int = 1,
        min_ascii_letters: float = 0.0,
        language: str | None = None,
        language_confidence: float = 0.5,
        boilerplate: list[str] | None = None,
        max_boilerplate: float = 0.5,
    ) -> None:
        """
        Args:
            min_side: minimum length of an image's shorter side, in pixels.
            max_pixels: maximum number of pixels (width x height) of an image, at most 178,956,970.
            min_aspect: minimum width / height; null for no bound.
            max_aspect: maximum width / height; null for no bound.
            min_caption_chars: minimum length of a caption, in characters without surrounding white space; at
                least 1.
            max_caption_chars: maximum length of a caption, in characters; null for no bound.
            min_caption_words: minimum number of words of a caption, separated by white space.
            min_ascii_letters: minimum share of letters that are a to z, which tells alphabets apart, but not languages.
            language: the captions' language, such as en, as the package py3langid names it; null for any.
            language_confidence: captions are rejected if they are in another language with at least this probability.
                The language of a short caption is often ambiguous. At 0, a caption is rejected whenever its most likely
                language is another one.
            boilerplate: regular expressions (RE2, ignoring case) of text that says nothing about the image, such as
                "photographed on .*".
            max_boilerplate: maximum share of a caption's characters that boilerplate may match.

        Raises:
            ValueError: a bound that nothing can meet, an invalid pattern, or an unknown language.
        """
        if not 1 <= max_pixels <= PILLOW_MAX_PIXELS:
            raise ValueError(f"filter.max_pixels is {max_pixels}: give 1 to {PILLOW_MAX_PIXELS}")
        if min_side < 1 or min_side**2 > max_pixels:
            raise ValueError(f"filter.min_side is {min_side}: give 1 or more, with its square within max_pixels")
        if min_aspect is not None and min_aspect < 0 or max_aspect is not None and max_aspect <= 0:
            raise ValueError("filter.min_aspect and max_aspect are width / height: give positive numbers")
        if min_aspect is not None and max_aspect is not None and min_aspect > max_aspect:
            raise ValueError(f"filter.min_aspect {min_aspect} is above max_aspect {max_aspect}: swap them")
        self.captions = CaptionRules(
            min_caption_chars,
            max_caption_chars,
            min_caption_words,
            min_ascii_letters,
            language,
            language_confidence,
            boilerplate or [],
            max_boilerplate,
        )
        # Of a billion pictures of the web thousands have damaged EXIF data, or more pixels than Pillow likes. It would
        # write two lines about each into the log of each process.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        self.min_side = min_side
        self.max_pixels = max_pixels
        self.min_aspect = min_aspect
        self.max_aspect = max_aspect

    def caption(self, sample: Sample) -> str | Rejected:
        """A sample's caption without surrounding white space, or why it is rejected. The image is not decoded."""
        caption = without_surrogates(sample.caption).strip()
        problem = self.captions.problem(caption)
        return caption if problem is None else Rejected(sample.key, *problem)

    def decode(self, sample: Sample, shrink_to: int | None = None) -> DecodedSample | Rejected:
        """Decodes a sample to upright RGB.

        The EXIF orientation is applied, transparent images are put on white, and animations give their first frame.
        Colour profiles are ignored, as by img2dataset, which leaves them out of its files, and by CLIP.

        Args:
            sample: a sample of a source.
            shrink_to: the largest resolution that will be cropped from the image, in pixels. A large JPEG is then
                decoded at 1/2, 1/4 or 1/8 of its size, which is several times faster. None decodes every pixel.

        Returns:
            The decoded sample, or `Rejected` with a reason from `base.REASONS`. Never raises because of the data.

        Raises:
            MemoryError: memory is lacking.
        """
        caption = self.caption(sample)
        if isinstance(caption, Rejected):
            return caption
        # Pillow's decoders raise almost anything on damaged data (OSError, SyntaxError, struct.error,
        # IndexError, ...); one image must not end a job over millions.
        try:
            return self._decode(sample, caption, shrink_to)
        except Image.DecompressionBombError as error:
            return Rejected(sample.key, "too_many_pixels", str(error))
        except Image.UnidentifiedImageError:
            return Rejected(sample.key, "broken_image", "not an image in a known format")
        except MemoryError:  # for at most `max_pixels`: the image may be whole
            raise
        except Exception as error:
            return Rejected(sample.key, "broken_image", f"{type(error).__name__}: {error}")

    def _decode(self, sample: Sample, caption: str, shrink_to: int | None) -> DecodedSample | Rejected:
        image = sample.image
        if isinstance(image, bytes):
            image = Image.open(io.BytesIO(image), formats=FORMATS)
        width, height = image.size  # from the header; nothing is decoded yet
        if width * height > self.max_pixels:
            return Rejected(sample.key, "too_many_pixels", f"{width}x{height}")
        if min(width, height) < self.min_side:
            return Rejected(sample.key, "too_small", f"{width}x{height}")
        pixels = None
        if image.format in ("JPEG", "MPO"):  # MPO: of some cameras
            if shrink_to is not None and _shrinks_well(image):
                image.draft(None, (JPEG_MARGIN * shrink_to, JPEG_MARGIN * shrink_to))
            if isinstance(sample.image, bytes):
                pixels = jpeg.decoded(sample.image, image)
        if pixels is None:
            image.load()
        orientation = _orientation(image)  # some formats store it behind the pixels
        if orientation >= 5:
            width, height = height, width
        aspect = width / height
        if self.min_aspect is not None and aspect < self.min_aspect:
            return Rejected(sample.key, "aspect", f"{width}x{height} is {aspect:.3f}")
        if self.max_aspect is not None and aspect > self.max_aspect:
            return Rejected(sample.key, "aspect", f"{width}x{height} is {aspect:.3f}")
        if pixels is None:
            rgb = to_rgb(image)
            if rgb is None:
                return Rejected(sample.key, "unsupported_image", f"pixels of type {image.mode}")
            pixels = np.array(rgb)
        if orientation in _UPRIGHT:
            pixels = np.ascontiguousarray(_UPRIGHT[orientation](pixels))
        return DecodedSample(sample.key, pixels, caption, (width, height))


def decoded(filter: Filter, sample: Sample, shrink_to: int | None = None) -> DecodedSample | Rejected:
    """What a filter makes of a sample, see `Filter.decode`.

    Raises:
        WrongResult: neither a sample that can be cropped nor a reason; such samples would be lost without a word, or
            black. Or a ValueError that the filter's own code raises.
        Exception: of the filter, with a note that names the sample.
    """
    what = f"{type(filter).__name__}.decode() of the sample {sample.key!r}"
    with _named(filter, what):
        found = filter.decode(sample, shrink_to)
    if isinstance(found, Rejected):
        return found
    what += " returns"
    if not isinstance(found, DecodedSample):
        raise WrongResult(f"{what} {brief(found)}; return a DecodedSample, or a Rejected with a reason")
    image, size = found.image, found.original_size
    if not (isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3):
        given = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else brief(image)
        raise WrongResult(f"{what} the image {given} instead of an array uint8 (height, width, 3)")
    if not (isinstance(size, tuple) and len(size) == 2 and min(image.shape[:2]) and min(size) > 0):
        raise WrongResult(f"{what} an image {image.shape} of the original size {size!r:.60}; give (width, height)")
    if not isinstance(found.caption, str) or not isinstance(found.key, str):
        raise WrongResult(f"{what} the key {brief(found.key)} and the caption {brief(found.caption)}; give texts")
    if without_surrogates(found.caption) != found.caption:
        raise WrongResult(f"{what} the caption {found.caption!r:.60}, which is no text; drop its lone surrogates")
    return found


@contextmanager
def _named(filter: Filter, what: str) -> Iterator[None]:
    """A context in which errors of a filter name what was done. A ValueError that its own code raises says what is
    wrong, and is one line also where a worker process sends it, which the note of a traceback is not."""
    try:
        with noted(what):
            yield
    except ValueError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        own = str(frame.f_globals.get("__name__")).split(".")[0] == type(filter).__module__.split(".")[0]
        if type(error) is ValueError and own and is_raised(error):
            raise WrongResult(f"{one_line(error)} ({what})") from error
        raise


def judged(filter: Filter, sample: Sample) -> str | Rejected:
    """What a filter makes of a sample's caption, see `Filter.caption`. Raises as `decoded`."""
    what = f"{type(filter).__name__}.caption() of the sample {sample.key!r}"
    with _named(filter, what):
        caption = filter.caption(sample)
    if not isinstance(caption, str | Rejected):
        raise WrongResult(f"{what} returns {brief(caption)}; return the text, or a Rejected with a reason")
    if isinstance(caption, str) and without_surrogates(caption) != caption:
        raise WrongResult(f"{what} returns {caption!r:.60}, which is no text; drop its lone surrogates")
    return caption


def to_rgb(image: Image.Image) -> Image.Image | None:
    """Converts any loaded image to 8-bit RGB, with transparency composed on white.

    Returns None for 32-bit integers and floats, because the file does not say their range (0..1, 0..255, metres, ...).
    """
    if image.mode.startswith("I;16"):
        # Pillow's own conversion clips values at 255 instead of scaling them.
        values = np.asarray(image).astype(np.uint32)
        clear = image.info.get("transparency")  # the one value of a PNG that is transparent
        if isinstance(clear, int):
            values[values == clear] = 65535
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        return None
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(rgba, mask=rgba.getchannel("A"))
        return white
    return image if image.mode == "RGB" else image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8; 1 if there is none or the EXIF block is damaged."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except MemoryError:
        raise
    except Exception:  # a damaged EXIF block can raise anything, and the pixels are still good
        return 1
    return value if value in _UPRIGHT else 1


def _shrinks_well(image: Image.Image) -> bool:
    """Whether the pixels of a decode at a fraction of a JPEG's size lie where `resize` expects them.

    Those of its last row and column may stand for fewer pixels than the others, and come first in a picture that is
    turned.
    """
    return _orientation(image) == 1 or not any(side % JPEG_SCALES[-1] for side in image.size)
