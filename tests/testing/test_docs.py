"""The example of docs/testing.md does what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


@pytest.mark.timeout(300)
def test_the_documented_example_passes(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    example = re.search(r'```python title="(\w+)\.py"\n(.*?)```', _PAGE.read_text(), re.DOTALL)
    assert example, "the page begins with a complete test file"
    pytester.makepyfile(**{example[1]: example[2]})
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    plugin = ("-p", "headway.testing.plugin")
    result = pytester.runpytest_subprocess(*plugin, "-p", "no:cacheprovider", "-W", "error")
    result.assert_outcomes(passed=5)


def test_the_page_knows_all_actions() -> None:
    from headway.system import failpoints

    table = re.findall(r"^\| `([^`]+)` \|", _PAGE.read_text(), re.MULTILINE)
    said = {part.strip().partition(" ")[0] for part in failpoints.ACTIONS.split(", ")}
    assert set(table) == said
