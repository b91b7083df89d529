"""The bus over Redis or Valkey: one server, a master named by sentinels, or a cluster."""
