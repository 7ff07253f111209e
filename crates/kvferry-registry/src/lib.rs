//! Who is there: leased membership over HTTP.
