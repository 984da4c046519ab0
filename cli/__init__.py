"""The command ``pdserve``: the top floor, which may import all programs. ``commands.py`` lists the commands."""
