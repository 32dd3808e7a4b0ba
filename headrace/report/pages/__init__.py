"""The report page of a run: one HTML file drawn from the files of the run directory."""

from headrace.report.pages.page import write_report
from headrace.report.pages.picture import write_picture
from headrace.report.pages.recorded_trace import write_trace
from headrace.report.pages.run_files import RunFiles, read_run
from headrace.report.pages.summary import summary

__all__ = ["RunFiles", "read_run", "summary", "write_picture", "write_report", "write_trace"]
