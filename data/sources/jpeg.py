"""JPEGs in which nothing is wrong, decoded to the same bytes as by Pillow, in less time and without a copy."""

import numpy as np
import simplejpeg
from PIL import Image

SPACES = ("YCbCr", "RGB", "Gray")  # not CMYK, whose inks Pillow inverts where Adobe's programs have


def decoded(data: bytes, image: Image.Image) -> np.ndarray | None:
    """Decodes a JPEG with libjpeg-turbo, which Pillow uses, too, but row by row into memory of another layout.

    Args:
        data: the whole file. Of several images in it (MPO), the first is decoded.
        image: the same, opened by Pillow and not loaded; its `size` may be a fraction, see `PIL.Image.Image.draft`.

    Returns:
        uint8 (H, W, 3) of this size; None if Pillow must decode it: in other colour spaces, or if anything is wrong
        with the file. Pillow then says what, or decodes what can be read.

    Raises:
        MemoryError: memory is lacking.
    """
    width, height = image.size
    try:
        # Before memory is taken for it: a header that Pillow reads in another way could claim any size.
        *size, space, _ = simplejpeg.decode_jpeg_header(data, min_height=height, min_width=width)
        if size != [height, width] or space not in SPACES:
            return None
        return simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width)
    except ValueError:
        return None
