"""Speculation: drafts of next tokens, which decodes verify (docs/speculation.md). The core does without it."""
