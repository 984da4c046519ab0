"""``pdserve chat``: a conversation with a model in a terminal.

terminal.py   reads messages and commands
conversation.py   messages and sampling parameters: the body of a request
client.py     requests to the router: models, a streamed answer
screen.py     an answer as Markdown while it streams
interrupts.py   Ctrl-C
"""
