"""Where the time of training goes: by class of operator, by switch, and to logging."""
