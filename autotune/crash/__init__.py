"""Understanding crashes: a server's log, exit status and timing become a `records.Crash`.

`classify.classify` is the entry; what it knows about failures is data in rules.yaml.
"""
