"""Workers found by themselves and paired by a code: announcement, codes, and paired workers."""
