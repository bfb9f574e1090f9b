"""From a trace and its outcomes to one ReportModel, and from it to every output format."""
