"""/v1/responses: request bodies become chats, parsed output becomes output items and events."""
