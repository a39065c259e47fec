//! Relays packets between a client and its server, or its daemon.
use std::os::fd::AsFd;
use std::time::Duration;

use tokio::time::sleep;

use super::{Door, WaitingConnection};
use crate::mps::daemon::DevicePhase;
use crate::mps::seqpacket::{Packet, Socket};
use crate::mps::wire::Enforcement;

/// Time without a packet after which a relayed connection to a daemon with an unknown protocol is
/// closed.
const IDLE_RELAY_TIMEOUT: Duration = Duration::from_secs(600);

/// Relays between a client and its server until one of them closes. Each packet reaches the server
/// with the credentials that the kernel attests for that packet, not with the handshake's
/// credentials. A packet without attested credentials ends the relay: the server would otherwise
/// receive this process's credentials.
pub(super) async fn relay(client: &Socket, server: &Socket) {
    let from_client = async {
        while let Ok(Some(Packet { data, credentials: Some(who), .. })) =
            client.recv_any_length_with_credentials().await
        {
            tokio::select! {
                biased;
                sent = server.send_credentials(&data, who) => if sent.is_err() { return },
                // Also wait for the close, because a server that never reads would block the send
                // forever.
                () = client.wait_until_closed() => return,
            }
        }
    };
    let from_server = async {
        while let Ok(Some(Packet { data, descriptor, .. })) = server.recv_any_length_with_descriptor().await {
            let sent = match descriptor {
                Some(descriptor) => client.send_descriptor(&data, descriptor.as_fd()).await,
                None => client.send(&data).await,
            };
            if sent.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = from_client => {}
        () = from_server => {}
    }
}

impl Door {
    /// Waits until the daemon serves, then relays all packets unchanged between a client and a
    /// daemon with an unknown handshake. Returns false without a relay if the serving daemon's
    /// handshake is known: the door can then enforce limits. Returns true once the connection is
    /// finished: the client or the daemon has disconnected, the daemon cannot be reached, or no
    /// packet arrived for a long time.
    pub(super) async fn relay_to_advisory_daemon(&self, client: &Socket) -> bool {
        let waiting = WaitingConnection::new(self);
        let mut phase = self.device.subscribe_to_phase();
        if !phase.borrow().is_open() {
            waiting.start_waiting();
        }
        let enforcement = tokio::select! {
            open = phase.wait_for(DevicePhase::is_open) => match open {
                Ok(open) => open.enforcement,
                Err(_) => return true,
            },
            () = client.wait_until_closed() => return true,
        };
        if enforcement == Enforcement::Hard {
            return false;
        }
        drop(waiting);
        self.relay_to_daemon(client).await;
        true
    }

    /// Relays all packets unchanged between a client and its daemon until one of them closes, or no
    /// packet has arrived for [`IDLE_RELAY_TIMEOUT`].
    async fn relay_to_daemon(&self, client: &Socket) {
        let Ok(daemon) = Socket::connect(&self.device.pipe.join("control")).await else { return };
        loop {
            let sent = tokio::select! {
                packet = client.recv_credentials() => match packet {
                    Ok(Some(packet)) => match packet.credentials {
                        Some(who) => daemon.send_credentials(&packet.data, who).await,
                        None => daemon.send(&packet.data).await,
                    },
                    _ => return,
                },
                packet = daemon.recv_descriptor() => match packet {
                    Ok(Some(packet)) => match packet.descriptor {
                        Some(descriptor) => {
                            self.count_admitted();
                            client.send_descriptor(&packet.data, descriptor.as_fd()).await
                        }
                        None => client.send(&packet.data).await,
                    },
                    _ => return,
                },
                () = sleep(IDLE_RELAY_TIMEOUT) => return,
            };
            if sent.is_err() {
                return;
            }
        }
    }
}
