"""The NIXL back end of the connector, over UCX."""
