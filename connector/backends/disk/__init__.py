"""Worker side of KV on disk: files of blocks, and threads that move them from and to host memory."""
