"""Pure transfer planning: which bytes of which remote rank go where."""
