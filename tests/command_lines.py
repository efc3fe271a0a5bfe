"""What programs say of options that they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def assert_refused(
    main: Callable[[list[str]], object],
    options: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """argparse ends the program with 2, and the sentence is on stderr."""
    with pytest.raises(SystemExit, match="2"):
        main(options)
    assert sentence in capsys.readouterr().err
