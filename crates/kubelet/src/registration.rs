//! Registering with the kubelet: the call, and the decision when to make it.

use std::path::Path;
use std::time::Duration;

use tonic::transport::Endpoint;

use crate::directory::{Directory, SocketId};
use crate::proto::DEVICE_PLUGIN_VERSION;
use crate::proto::v1beta1 as wire;
use crate::proto::v1beta1::device_plugin_client::DevicePluginClient;
use crate::proto::v1beta1::registration_client::RegistrationClient;
use crate::resource::{Options, ResourceName};

/// For our own answer. The kubelet gives a plugin 10 s.
const SELF_DIAL: Duration = Duration::from_secs(5);

/// An endpoint for a unix socket, or nothing if the path is not one.
pub(crate) fn unix(path: &str) -> Option<Endpoint> {
    // Servers that check `:authority` refuse a path there; `localhost` is what gRPC's naming
    // demands for unix sockets.
    let localhost = tonic::codegen::http::Uri::from_static("http://localhost");
    Some(Endpoint::from_shared(format!("unix://{path}")).ok()?.origin(localhost))
}

/// Why a registration did not succeed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegisterError {
    /// Nobody listens at `kubelet.sock`: the kubelet binds before it listens, and a killed one
    /// leaves its socket behind.
    #[error("nobody answers at kubelet.sock")]
    Unanswered(#[source] tonic::transport::Error),
    /// The kubelet said no, or died while it thought about it.
    #[error("the kubelet refused: {}", .0.message())]
    Refused(#[source] Box<tonic::Status>),
    /// It neither accepted nor refused.
    #[error("the kubelet did not answer within {0:?}")]
    Deadline(Duration),
    /// The path cannot be dialled.
    #[error("{0:?} is not a path that can be dialled")]
    Path(std::path::PathBuf),
}

/// Asks the kubelet to connect to our socket. It dials back and reads the options before it
/// answers.
pub(crate) async fn register(
    directory: &Directory,
    socket: &Path,
    resource: &ResourceName,
    options: Options,
    deadline: Duration,
) -> Result<(), RegisterError> {
    let kubelet = directory.kubelet_socket();
    let bad = || RegisterError::Path(socket.to_owned());
    let endpoint = kubelet.to_str().and_then(unix).ok_or_else(bad)?;
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

/// Why our own socket does not serve.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SelfDialError {
    #[error("cannot connect to our own socket")]
    Connect(#[source] tonic::transport::Error),
    #[error("our own socket does not answer: {}", .0.message())]
    Call(#[source] Box<tonic::Status>),
    #[error("our own socket did not answer within {0:?}")]
    Deadline(Duration),
    #[error("our own socket's path cannot be dialled")]
    Path,
}

/// Does what the kubelet will do first, so that it is asked to only if it will succeed.
pub(crate) async fn self_dial(socket: &Path) -> Result<(), SelfDialError> {
    let endpoint = socket.to_str().and_then(unix).ok_or(SelfDialError::Path)?;
    let call = async {
        let channel = endpoint.connect().await.map_err(SelfDialError::Connect)?;
        let asked = DevicePluginClient::new(channel).get_device_plugin_options(wire::Empty {}).await;
        asked.map_err(|status| SelfDialError::Call(Box::new(status)))
    };
    tokio::time::timeout(SELF_DIAL, call).await.map_err(|_| SelfDialError::Deadline(SELF_DIAL))?.map(drop)
}

/// What a look at a registered plugin shows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    /// The `kubelet.sock` that was registered with.
    pub(crate) registered_with: SocketId,
    /// The one that lies there now.
    pub(crate) kubelet: Option<SocketId>,
    /// Whether our own socket lies where the kubelet was told.
    pub(crate) reachable: bool,
    /// Whether the kubelet was told other options than the resource has now.
    pub(crate) options_changed: bool,
    /// Since how long no stream is open; nothing while one is.
    pub(crate) streamless_for: Option<Duration>,
}

/// What to do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing, until something changes.
    Keep,
    /// Look again after this time, if nothing changes before.
    LookAgain(Duration),
    /// Bind our socket again at its path, leaving the stream as it is.
    Rebind,
    /// End this session and register a new one.
    Register(Cause),
}

/// Why a registration is made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// `kubelet.sock` is another socket than the one registered with.
    KubeletRestarted,
    /// Our own socket is gone and no stream is open.
    SocketLost,
    /// The kubelet opened no stream, or ended it, and did not restart.
    NoStream,
    /// The resource was replaced by one with other options, which the kubelet reads only once.
    OptionsChanged,
}

/// Decides by what is there, not by which events came: events may be lost, late or repeated, as the
/// creation of a `kubelet.sock` that arrives after the registration with that very socket.
pub(crate) fn decide(seen: &Seen, grace: Duration) -> Step {
    let streaming = seen.streamless_for.is_none();
    match seen.kubelet {
        Some(kubelet) if kubelet != seen.registered_with => return Step::Register(Cause::KubeletRestarted),
        // Nobody to register with; its return changes the directory.
        None if !streaming => return Step::Keep,
        _ => {}
    }
    if seen.options_changed && seen.kubelet.is_some() {
        return Step::Register(Cause::OptionsChanged);
    }
    match seen.streamless_for {
        // Re-registering would take the devices away for a moment, while the kubelet's connection
        // works without the file.
        None if !seen.reachable => Step::Rebind,
        None => Step::Keep,
        Some(_) if !seen.reachable => Step::Register(Cause::SocketLost),
        Some(since) if since >= grace => Step::Register(Cause::NoStream),
        Some(since) => Step::LookAgain(grace.saturating_sub(since)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(2);

    /// Two sockets bound one after the other, and what a healthy plugin looks like that registered
    /// with the first.
    fn healthy() -> (Seen, SocketId) {
        let folder = tempfile::tempdir().expect("a folder");
        let bind = |name: &str| {
            let path = folder.path().join(name);
            let _listener = std::os::unix::net::UnixListener::bind(&path).expect("bind");
            SocketId::of(&path).expect("a socket")
        };
        let (first, second) = (bind("first"), bind("second"));
        let seen = Seen {
            registered_with: first,
            kubelet: Some(first),
            reachable: true,
            options_changed: false,
            streamless_for: None,
        };
        (seen, second)
    }

    #[test]
    fn a_streaming_plugin_is_left_alone() {
        let (seen, _) = healthy();
        assert_eq!(decide(&seen, GRACE), Step::Keep);
        assert_eq!(decide(&Seen { kubelet: None, ..seen }, GRACE), Step::Keep, "the stream works without kubelet.sock");
    }

    #[test]
    fn another_kubelet_socket_is_registered_with_even_while_a_stream_is_open() {
        let (seen, other) = healthy();
        for streamless_for in [None, Some(Duration::ZERO)] {
            let seen = Seen { kubelet: Some(other), streamless_for, reachable: false, ..seen };
            assert_eq!(decide(&seen, GRACE), Step::Register(Cause::KubeletRestarted));
        }
    }

    #[test]
    fn a_missing_stream_is_waited_for_and_then_acted_on() {
        let (seen, _) = healthy();
        let after = |since| Seen { streamless_for: Some(since), ..seen };
        assert_eq!(decide(&after(Duration::from_millis(500)), GRACE), Step::LookAgain(Duration::from_millis(1500)));
        assert_eq!(decide(&after(GRACE), GRACE), Step::Register(Cause::NoStream));
        let gone = Seen { kubelet: None, ..after(GRACE * 10) };
        assert_eq!(decide(&gone, GRACE), Step::Keep, "there is nobody to register with");
    }

    #[test]
    fn a_deleted_socket_is_bound_again_under_a_stream_and_registered_anew_without_one() {
        let (seen, _) = healthy();
        let lost = Seen { reachable: false, ..seen };
        assert_eq!(decide(&lost, GRACE), Step::Rebind);
        let lost = Seen { streamless_for: Some(Duration::ZERO), ..lost };
        assert_eq!(decide(&lost, GRACE), Step::Register(Cause::SocketLost));
    }

    #[test]
    fn other_options_are_registered() {
        let (seen, _) = healthy();
        assert_eq!(decide(&Seen { options_changed: true, ..seen }, GRACE), Step::Register(Cause::OptionsChanged));
        let no_kubelet = Seen { options_changed: true, kubelet: None, ..seen };
        assert_eq!(decide(&no_kubelet, GRACE), Step::Keep);
    }
}
