//! sonar-runtime
