"""``python -m router.images.decode_process``: decodes images for decoders.py until stdin ends."""

from __future__ import annotations

import binascii
import math
import os
import resource
import signal
import warnings
from contextlib import suppress
from pathlib import Path

import msgspec

from pdserve.errors import RequestError
from pdserve.host.process import end_with_parent
from pdserve.images import image_digest
from router.freed_memory import map_large_blocks
from router.images.decoders import DecoderConfig, DecodeRequest, DecodeResult
from router.images.decoding import decode
from router.text.worker_process import read_message, write_message

_NICE = 5  # the router's loop and its streams go first
_BLANKS = b" \t\r\n"  # tools break base64 into lines


def main() -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the router, which ends this process
    config = msgspec.json.decode(read_message() or b"", type=DecoderConfig)
    os.nice(_NICE)
    with suppress(OSError):  # out of memory, the kernel ends this process before the router
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_AS, (config.max_memory, config.max_memory))
    warnings.simplefilter("ignore")  # Pillow warns of odd files
    map_large_blocks()
    write_message(b"")
    while (message := read_message()) is not None:
        _limit_time(config.seconds)
        write_message(msgspec.json.encode(_decode(config.scratch, message)))


def _limit_time(seconds: int) -> None:
    """Have the kernel end this process after so much more CPU time. A busy machine changes nothing."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + seconds, most))


def _decode(scratch: int, message: bytes) -> DecodeResult:
    """Replace a file by its pixels."""
    request = msgspec.json.decode(message, type=DecodeRequest)
    try:
        height, width, pixels = decode(_read(scratch, request.is_base64), request.accepted)
        os.ftruncate(scratch, 0)
        os.lseek(scratch, 0, os.SEEK_SET)
        view = memoryview(pixels)
        while view:
            view = view[os.write(scratch, view) :]
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
