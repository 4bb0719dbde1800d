"""The plugin is loaded in every pytest run on the machine: those that do not use it must not notice."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_loading_the_plugin_loads_nothing_heavy() -> None:
    code = "import sys; import headway.testing.plugin; print(sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=180
    )
    modules = set(eval(loaded.stdout))
    assert not modules & {"torch", "numpy", "psutil", "multiprocessing.connection", "headway.dist"}
    ours = {name for name in modules if name.startswith("headway")}
    assert ours == {"headway", "headway.lazy", "headway.testing", "headway.testing.plugin"}


def test_a_session_without_ranks_never_imports_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_plain():
            assert "headway.testing.plugin" in sys.modules
            assert not {"torch", "psutil", "headway.testing.pool"} & set(sys.modules)
        """
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_exported_names_exist_and_are_sorted() -> None:
    from headway import testing

    assert testing.__all__ == sorted(testing.__all__)
    assert dir(testing) == testing.__all__
    for name in testing.__all__:
        assert getattr(testing, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_this"):
        testing.nothing_like_this  # noqa: B018
