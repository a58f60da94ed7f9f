"""The wire format: protobuf definitions, generated stubs, and total conversion to and from core."""
