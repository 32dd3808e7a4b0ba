"""The report page of a run: one HTML file drawn from the files of the run directory."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.report.pages.page import write_report as write_report
    from headrace.report.pages.picture import write_picture as write_picture
    from headrace.report.pages.recorded_trace import write_trace as write_trace
    from headrace.report.pages.run_files import RunFiles as RunFiles
    from headrace.report.pages.run_files import read_run as read_run

__getattr__ = lazy_face(__name__)
