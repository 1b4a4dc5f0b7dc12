//! sonar-scheduler
