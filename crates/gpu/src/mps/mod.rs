//! MPS: what the agent and the MPS host tell each other, the control protocol, the supervisor and the door.
pub mod wire;
