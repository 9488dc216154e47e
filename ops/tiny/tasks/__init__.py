"""What ds4-tiny learns: a module for each kind of task, made of words by `ops.tiny.words`."""
