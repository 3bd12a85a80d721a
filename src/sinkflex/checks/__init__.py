"""What `sinkflex check` proves, one function a promise: it returns what it measured, or raises `Broken`."""
