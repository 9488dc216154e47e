"""`ds4ctl`: a thin client of the control socket."""
