"""The report page of a run: one HTML file drawn from the files of the run directory."""

from headrace.report.pages.page import write_report as write_report
from headrace.report.pages.picture import write_picture as write_picture
from headrace.report.pages.recorded_trace import write_trace as write_trace
from headrace.report.pages.run_files import RunFiles as RunFiles
from headrace.report.pages.run_files import read_run as read_run
from headrace.report.pages.summary import summary as summary
