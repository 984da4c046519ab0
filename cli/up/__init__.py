"""``pdserve up``: start, watch, restart and stop the processes of one machine. It may import all programs."""
