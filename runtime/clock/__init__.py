"""The clock: how calls are timed against each other, in which processes, on what machine; tiny graphs."""
