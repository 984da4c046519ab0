"""/v1/messages: Anthropic's conversations become chats, parsed output becomes content blocks and events."""
