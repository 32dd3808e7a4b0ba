"""Applications beside the core: the pages of a run, and a model as one GGUF file for other programs."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.apps.gguf.gguf_writing import OUT_TYPES, refuse_unwritable, write_gguf
    from headrace.apps.pages.page import write_report
    from headrace.apps.pages.picture import write_picture
    from headrace.apps.pages.plan_page import write_plan_page
    from headrace.apps.pages.recorded_trace import write_trace
    from headrace.apps.pages.run_files import RunFiles, read_run
    from headrace.apps.pages.summary import summary
    from headrace.apps.pages.watch import WatchServer

__getattr__ = lazy_face(__name__)
