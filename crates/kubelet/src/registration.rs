//! Registers plugins with the kubelet, and decides when a plugin must register again.

use std::path::Path;
use std::time::Duration;

use tonic::transport::Endpoint;

use crate::directory::{Directory, SocketId};
use crate::proto::DEVICE_PLUGIN_VERSION;
use crate::proto::v1beta1 as wire;
use crate::proto::v1beta1::device_plugin_client::DevicePluginClient;
use crate::proto::v1beta1::registration_client::RegistrationClient;
use crate::resource::{PluginOptions, ResourceName};

/// Deadline for the answer from Cleave's own socket. The kubelet's deadline for a plugin is 10 s.
const OWN_SOCKET_TIMEOUT: Duration = Duration::from_secs(5);

/// Creates an endpoint for a Unix socket. Returns `None` if the path cannot be used as an address.
pub(crate) fn unix_endpoint(path: &str) -> Option<Endpoint> {
    // Servers that check `:authority` refuse a path. gRPC prescribes `localhost` for Unix sockets.
    let localhost = tonic::codegen::http::Uri::from_static("http://localhost");
    Some(Endpoint::from_shared(format!("unix://{path}")).ok()?.origin(localhost))
}

/// Why a registration failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegisterError {
    /// The connection to `kubelet.sock` failed. The kubelet binds the socket before it listens, and
    /// a killed kubelet does not remove the socket.
    #[error("failed to connect to kubelet.sock")]
    Unanswered(#[source] tonic::transport::Error),
    /// The kubelet refused the registration, or stopped during the call.
    #[error("the kubelet refused the registration: {}", .0.message())]
    Refused(#[source] Box<tonic::Status>),
    /// The kubelet did not answer before the deadline.
    #[error("the kubelet did not answer within {} s", .0.as_secs_f64())]
    Deadline(Duration),
    /// The path cannot be used as a socket address.
    #[error("the path {0:?} of Cleave's device plugin socket cannot be used as a socket address")]
    Path(std::path::PathBuf),
}

/// Registers a resource with the kubelet. Before it answers, the kubelet connects to Cleave's
/// socket and reads the options.
pub(crate) async fn register(
    directory: &Directory,
    socket: &Path,
    resource: &ResourceName,
    options: PluginOptions,
    deadline: Duration,
) -> Result<(), RegisterError> {
    let kubelet = directory.kubelet_socket();
    let bad = || RegisterError::Path(socket.to_owned());
    let endpoint = kubelet.to_str().and_then(unix_endpoint).ok_or_else(bad)?;
    let request = wire::RegisterRequest {
        version: DEVICE_PLUGIN_VERSION.to_owned(),
        endpoint: socket.file_name().and_then(|name| name.to_str()).ok_or_else(bad)?.to_owned(),
        resource_name: resource.as_str().to_owned(),
        options: Some(options.into()),
    };
    let call = async {
        let channel = endpoint.connect().await.map_err(RegisterError::Unanswered)?;
        RegistrationClient::new(channel)
            .register(request)
            .await
            .map_err(|status| RegisterError::Refused(Box::new(status)))
    };
    tokio::time::timeout(deadline, call).await.map_err(|_| RegisterError::Deadline(deadline))?.map(drop)
}

/// Why Cleave's device plugin socket does not answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OwnSocketError {
    #[error("failed to connect to Cleave's device plugin socket")]
    Connect(#[source] tonic::transport::Error),
    #[error("Cleave's device plugin socket does not answer: {}", .0.message())]
    Call(#[source] Box<tonic::Status>),
    #[error("Cleave's device plugin socket did not answer within {} s", .0.as_secs_f64())]
    Deadline(Duration),
    #[error("the path of Cleave's device plugin socket cannot be used as a socket address")]
    Path,
}

/// Reads the options from Cleave's own socket, as the kubelet does first. If this call fails, a
/// registration cannot succeed.
pub(crate) async fn probe_own_socket(socket: &Path) -> Result<(), OwnSocketError> {
    let endpoint = socket.to_str().and_then(unix_endpoint).ok_or(OwnSocketError::Path)?;
    let call = async {
        let channel = endpoint.connect().await.map_err(OwnSocketError::Connect)?;
        let answer = DevicePluginClient::new(channel).get_device_plugin_options(wire::Empty {}).await;
        answer.map_err(|status| OwnSocketError::Call(Box::new(status)))
    };
    tokio::time::timeout(OWN_SOCKET_TIMEOUT, call)
        .await
        .map_err(|_| OwnSocketError::Deadline(OWN_SOCKET_TIMEOUT))?
        .map(drop)
}

/// The observed state of a registered plugin.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PluginObservation {
    /// The `kubelet.sock` with which the plugin is registered.
    pub(crate) registered_with: SocketId,
    /// The current `kubelet.sock`.
    pub(crate) kubelet: Option<SocketId>,
    /// Whether Cleave's socket still exists at its path.
    pub(crate) reachable: bool,
    /// Whether the resource's options have changed since the registration.
    pub(crate) options_changed: bool,
    /// Time since the last stream ended, or since the registration if the kubelet has opened no
    /// stream. `None` while a stream is open.
    pub(crate) streamless_for: Option<Duration>,
}

/// The next step for a registered plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegistrationStep {
    /// Wait for a change.
    Keep,
    /// Check again after this time, or when something changes.
    CheckAgain(Duration),
    /// Bind Cleave's socket at its path again. The stream continues.
    Rebind,
    /// End this session and register a new session.
    Register(RegistrationCause),
}

/// Reason for a repeated registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegistrationCause {
    /// `kubelet.sock` is not the socket with which the plugin is registered.
    KubeletRestarted,
    /// Cleave's socket was deleted and no stream is open.
    SocketLost,
    /// The kubelet opened no stream, or ended its stream without restarting.
    NoStream,
    /// A resource with different options replaced this resource. The kubelet reads options only at
    /// a registration.
    OptionsChanged,
}

/// Returns the next step for a registered plugin. Decides from the observed state, because events
/// can be lost, late or repeated. For example, inotify can report the creation of `kubelet.sock`
/// after the registration with that socket.
pub(crate) fn next_registration_step(seen: &PluginObservation, grace: Duration) -> RegistrationStep {
    let streaming = seen.streamless_for.is_none();
    match seen.kubelet {
        Some(kubelet) if kubelet != seen.registered_with => {
            return RegistrationStep::Register(RegistrationCause::KubeletRestarted);
        }
        // Without a kubelet and a stream, no step is necessary. When a kubelet starts, the
        // directory changes.
        None if !streaming => return RegistrationStep::Keep,
        _ => {}
    }
    if seen.options_changed && seen.kubelet.is_some() {
        return RegistrationStep::Register(RegistrationCause::OptionsChanged);
    }
    match seen.streamless_for {
        // Do not register again, because a registration makes the devices unavailable for a moment.
        // The kubelet's open connection works without the socket file.
        None if !seen.reachable => RegistrationStep::Rebind,
        None => RegistrationStep::Keep,
        Some(_) if !seen.reachable => RegistrationStep::Register(RegistrationCause::SocketLost),
        Some(since) if since >= grace => RegistrationStep::Register(RegistrationCause::NoStream),
        Some(since) => RegistrationStep::CheckAgain(grace.saturating_sub(since)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM_GRACE: Duration = Duration::from_secs(2);

    /// Returns the observation of a healthy plugin, and the id of a kubelet socket that was bound
    /// after the plugin's registration.
    fn healthy_observation() -> (PluginObservation, SocketId) {
        let directory = tempfile::tempdir().expect("a directory");
        let bind = |name: &str| {
            let path = directory.path().join(name);
            let _listener = std::os::unix::net::UnixListener::bind(&path).expect("bind");
            SocketId::of(&path).expect("a socket")
        };
        let (first, second) = (bind("first"), bind("second"));
        let seen = PluginObservation {
            registered_with: first,
            kubelet: Some(first),
            reachable: true,
            options_changed: false,
            streamless_for: None,
        };
        (seen, second)
    }

    #[test]
    fn a_streaming_plugin_does_not_register_again() {
        let (seen, _) = healthy_observation();
        assert_eq!(next_registration_step(&seen, STREAM_GRACE), RegistrationStep::Keep);
        assert_eq!(
            next_registration_step(&PluginObservation { kubelet: None, ..seen }, STREAM_GRACE),
            RegistrationStep::Keep,
            "the stream works without kubelet.sock"
        );
    }

    #[test]
    fn a_new_kubelet_socket_causes_a_registration_despite_an_open_stream() {
        let (seen, other) = healthy_observation();
        for streamless_for in [None, Some(Duration::ZERO)] {
            let seen = PluginObservation { kubelet: Some(other), streamless_for, reachable: false, ..seen };
            assert_eq!(
                next_registration_step(&seen, STREAM_GRACE),
                RegistrationStep::Register(RegistrationCause::KubeletRestarted)
            );
        }
    }

    #[test]
    fn a_missing_stream_causes_a_registration_after_the_grace_period() {
        let (seen, _) = healthy_observation();
        let after = |since| PluginObservation { streamless_for: Some(since), ..seen };
        assert_eq!(
            next_registration_step(&after(Duration::from_millis(500)), STREAM_GRACE),
            RegistrationStep::CheckAgain(Duration::from_millis(1500))
        );
        assert_eq!(
            next_registration_step(&after(STREAM_GRACE), STREAM_GRACE),
            RegistrationStep::Register(RegistrationCause::NoStream)
        );
        let gone = PluginObservation { kubelet: None, ..after(STREAM_GRACE * 10) };
        assert_eq!(
            next_registration_step(&gone, STREAM_GRACE),
            RegistrationStep::Keep,
            "there is no kubelet to register with"
        );
    }

    #[test]
    fn a_deleted_socket_is_rebound_or_registered_again_without_a_stream() {
        let (seen, _) = healthy_observation();
        let lost = PluginObservation { reachable: false, ..seen };
        assert_eq!(next_registration_step(&lost, STREAM_GRACE), RegistrationStep::Rebind);
        let lost = PluginObservation { streamless_for: Some(Duration::ZERO), ..lost };
        assert_eq!(
            next_registration_step(&lost, STREAM_GRACE),
            RegistrationStep::Register(RegistrationCause::SocketLost)
        );
    }

    #[test]
    fn changed_options_cause_a_registration() {
        let (seen, _) = healthy_observation();
        assert_eq!(
            next_registration_step(&PluginObservation { options_changed: true, ..seen }, STREAM_GRACE),
            RegistrationStep::Register(RegistrationCause::OptionsChanged)
        );
        let no_kubelet = PluginObservation { options_changed: true, kubelet: None, ..seen };
        assert_eq!(next_registration_step(&no_kubelet, STREAM_GRACE), RegistrationStep::Keep);
    }
}
