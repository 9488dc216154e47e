"""ds4top, the dashboard: of ds4d it knows the records of the control socket, `ds4d.wire`."""
