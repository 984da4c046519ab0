"""``python -m router.images.fetch_process``: fetches images for fetchers.py until stdin ends."""

from __future__ import annotations

import msgspec

from pdserve.errors import RequestError
from router.images.fetchers import FetcherConfig, FetchResult
from router.images.fetching import Fetcher
from router.images.process_limits import begin, limit_memory, limit_time, replace_content
from router.text.worker_process import read_message, write_message


def main() -> None:
    begin()
    config = msgspec.json.decode(read_message() or b"", type=FetcherConfig)
    fetcher = Fetcher(config.rule)
    limit_memory(config.max_memory)
    write_message(b"")
    while (message := read_message()) is not None:
        limit_time(config.seconds)
        write_message(msgspec.json.encode(_fetch(fetcher, config.scratch, message.decode())))


def _fetch(fetcher: Fetcher, scratch: int, url: str) -> FetchResult:
    """Put the file at a URL into the scratch file."""
    try:
        body = fetcher.fetch(url)
        replace_content(scratch, body)
        return FetchResult(len(body))
    except RequestError as exc:
        return FetchResult(error=str(exc))


if __name__ == "__main__":
    main()
