"""A Lark grammar of patches, built of what the one of Codex' `apply_patch` is built of."""

PATCH = """\
start: first file+ last
first: "*** Begin Patch" LF
last: "*** End Patch" LF?

file: added | removed | updated
added: "*** Add File: " path LF (line_of_new)+
removed: "*** Delete File: " path LF
updated: "*** Update File: " path LF moved? edits?

path: /(.+)/
line_of_new: "+" /(.*)/ LF -> line
moved: "*** Move to: " path LF
edits: (place | edit)+ at_end?
place: ("@@" | "@@ " /(.+)/) LF
edit: ("+" | "-" | " ") /(.*)/ LF
at_end: "*** End of File" LF

%import common.LF
"""
