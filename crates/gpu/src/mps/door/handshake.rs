//! The handshake of a client with a door, and the client's introduction to the server.
use std::os::fd::OwnedFd;

use nix::sys::socket::MsgFlags;

use crate::mps::protocol::{self, PeerKind};
use crate::mps::seqpacket::{Credentials, Socket, send_without_waiting};

/// Why a door refuses a connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error("the handshake with the door took too long")]
    TooSlow,
    #[error("the client does not use the MPS handshake")]
    NoHandshake,
    #[error("the client is in a PID namespace that the MPS host cannot see: the MPS host needs hostPID")]
    ForeignNamespace,
    #[error("the client claims to be process {0}")]
    Impostor(u32),
    #[error("the client's process has exited and left its connection to another process")]
    ProcessExited,
    #[error("the client sent no credentials")]
    NoCredentials,
    #[error("the client is an administrator: doors accept no commands")]
    Administrator,
    #[error("the peer is neither a client nor an administrator")]
    UnknownKind,
    #[error("the allocation already has its maximum of {0} clients")]
    TooManyClients(u32),
    #[error("the allocation already has its maximum of {0} connections to the server")]
    TooManyConnections(usize),
    #[error("the MPS daemon uses an unknown handshake, so its limits are advisory; the client has to connect again")]
    UnknownHandshake,
    #[error("the client did not complete the handshake with the MPS server")]
    Stalled,
}

/// The result of a peer's handshake with the door.
pub(super) enum IntroducedPeer {
    Client(Credentials),
    /// The peer closed the connection. Each client closes its first connection, which only checks
    /// whether a daemon exists.
    Closed,
    Refused(Refusal),
}

/// Performs the daemon's part of the handshake, up to the packet with the client's kind.
pub(super) async fn run_client_handshake(client: &Socket, peer: Credentials) -> IntroducedPeer {
    if client.send(protocol::HELLO_PACKET).await.is_err() {
        return IntroducedPeer::Closed;
    }
    let Ok(Some(packet)) = client.recv_credentials().await else { return IntroducedPeer::Closed };
    if packet.data != protocol::CREDENTIALS_PACKET {
        return IntroducedPeer::Refused(Refusal::NoHandshake);
    }
    let who = match packet.credentials {
        Some(who) if who.pid == 0 => return IntroducedPeer::Refused(Refusal::ForeignNamespace),
        // A privileged process can send the credentials of another process. Without this check, the
        // MPS host would count and signal that other process.
        Some(who) if who.pid != peer.pid => return IntroducedPeer::Refused(Refusal::Impostor(who.pid)),
        Some(who) => who,
        None => return IntroducedPeer::Refused(Refusal::NoCredentials),
    };
    let Ok(Some(packet)) = client.recv_credentials().await else { return IntroducedPeer::Closed };
    match PeerKind::parse(&packet.data) {
        PeerKind::Client => IntroducedPeer::Client(who),
        PeerKind::Administrator => IntroducedPeer::Refused(Refusal::Administrator),
        PeerKind::Unknown => IntroducedPeer::Refused(Refusal::UnknownKind),
    }
}

/// Introduces a client to its server on the client's behalf. Never waits.
pub(super) fn introduce_client_to_server(server: &OwnedFd, who: Credentials) {
    let send = |packet: &[u8], who| send_without_waiting(server, packet, who, MsgFlags::MSG_DONTWAIT);
    let [first, rest @ ..] = protocol::INTRODUCTION_PACKETS;
    // Sending the client's credentials fails if the client has exited: the kernel accepts only
    // credentials of living processes.
    let sent = send(first, Some(who)).or_else(|_| send(first, Some(Credentials::of_this_process())));
    if sent.is_ok() {
        for packet in rest {
            let _ = send(packet, None);
        }
    }
}
