"""lm-eval: its tasks on a model of any size (docs/evaluation.md). It needs the extra `eval`."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.integrations.lm_eval.model import HeadraceLM as HeadraceLM
    from headrace.integrations.lm_eval.tasks import run_tasks as run_tasks

__getattr__ = lazy_face(__name__)
