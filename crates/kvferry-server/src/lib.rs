//! HTTP face of an instance: prefill, decode and registry roles, admin endpoints.
