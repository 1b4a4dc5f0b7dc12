//! sonar-cpu
