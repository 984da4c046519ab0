"""``pdserve bench``: load on a running server, as its clients measure it.

http_load.py  client: streamed completions, and the arrival time of each token
requests.py   random prompts and bodies
images.py     random images
datasets.py   prompts of a file
command.py    runs the load
report.py     figures, table, plots
"""
