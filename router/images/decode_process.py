"""``python -m router.images.decode_process``: decodes images for decoders.py until stdin ends."""

from __future__ import annotations

import binascii
import os
import warnings

import msgspec

from pdserve.errors import RequestError
from pdserve.images import image_digest
from router.images.decoders import DecoderConfig, DecodeRequest, DecodeResult
from router.images.decoding import decode, measure
from router.images.process_limits import begin, limit_memory, limit_time, replace_content
from router.text.worker_process import read_message, write_message

_BLANKS = b" \t\r\n"  # tools break base64 into lines


def main() -> None:
    begin()
    config = msgspec.json.decode(read_message() or b"", type=DecoderConfig)
    limit_memory(config.max_memory)
    warnings.simplefilter("ignore")  # Pillow warns of odd files
    write_message(b"")
    while (message := read_message()) is not None:
        limit_time(config.seconds)
        write_message(msgspec.json.encode(_decode(config.scratch, message)))


def _decode(scratch: int, message: bytes) -> DecodeResult:
    """Replace a file by its pixels, unless only its size is asked for."""
    request = msgspec.json.decode(message, type=DecodeRequest)
    try:
        file = _read(scratch, request.is_base64)
        if request.measures:
            os.ftruncate(scratch, 0)
            return DecodeResult(*measure(file, request.accepted))
        height, width, pixels = decode(file, request.accepted)
        replace_content(scratch, pixels)
        return DecodeResult(height, width, image_digest(request.accepted.fingerprint, height, width, pixels))
    except RequestError as exc:
        return DecodeResult(error=str(exc))
    except binascii.Error as exc:
        return DecodeResult(error=f"the data is no base64: {exc}; send the file's bytes in base64")
    except MemoryError:
        return DecodeResult(error="the image takes too much memory to decode; send it in a smaller size")


def _read(scratch: int, is_base64: bool) -> bytes:
    size = os.fstat(scratch).st_size
    data = os.pread(scratch, size, 0)
    return binascii.a2b_base64(data.translate(None, _BLANKS), strict_mode=True) if is_base64 else data


if __name__ == "__main__":
    main()
