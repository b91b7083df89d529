"""The store on Redis or Valkey, and the connections that the bus on Redis shares with it."""
