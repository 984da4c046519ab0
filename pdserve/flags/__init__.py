"""Flags of all commands: their parser, their types, and options that declare their own flags."""
