"""A run keeps the chat template that it was given. Run: pytest tests/runs/test_run_chat_template.py"""

from pathlib import Path

import pytest

from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import ConfigError
from headrace.terms.options.run_options import RunOptions


def test_the_run_directory_has_its_own_copy_and_forgets_it_with_the_rest(tmp_path):
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    run = RunDirectory(tmp_path / "run")
    made = run.write_config(RunOptions(model="m", data="d", chat_template=template))
    template.unlink()
    assert run.read_config().chat_template == run.chat_template
    assert run.chat_template.read_text() == "{{ messages[0]['content'] }}"
    run.forget(made)
    assert not run.path.exists()


@pytest.mark.parametrize(("content", "why"), [(None, "cannot be read"), ("  \n", "is empty")])
def test_a_template_that_is_none_is_refused(tmp_path: Path, content, why):
    from headrace.data.batches.open_data import read_chat_template

    if content is not None:
        (tmp_path / "t.jinja").write_text(content)
    with pytest.raises(ConfigError, match=f"chat_template: .*{why}"):
        read_chat_template(tmp_path / "t.jinja")
