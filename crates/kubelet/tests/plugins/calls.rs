//! Tests calls from the kubelet, and connections of other clients.

use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use cleave_kubelet::proto::v1beta1 as wire;
use cleave_kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tonic::Code;

use crate::{
    Fixture, MPS_RESOURCE, TEST_TIMEOUT, TestResource, connect_to_plugin, count_registrations, wait_until_served,
};

#[tokio::test]
async fn calls_return_the_resources_answers() {
    let fixture = Fixture::new();
    let kubelet = fixture.start_kubelet();
    let _plugins = fixture.start_plugins(&[(MPS_RESOURCE, &TestResource::new(&["a::0", "a::1"]))]);
    wait_until_served(&kubelet, MPS_RESOURCE, &["a::0", "a::1"]).await;

    let response = kubelet.allocate(MPS_RESOURCE, &["a::1", "a::0"]).await.expect("allocated");
    assert_eq!(response.envs["IDS"], "a::1,a::0");
    assert_eq!((response.mounts[0].host_path.as_str(), response.mounts[0].read_only), ("/h", true));
    assert_eq!(
        (response.devices[0].container_path.as_str(), response.devices[0].permissions.as_str()),
        ("/dev/c", "rw")
    );
    assert_eq!((response.cdi_devices[0].name.as_str(), response.annotations["a"].as_str()), ("nvidia.com/gpu=0", "b"));
    let refused = kubelet.allocate(MPS_RESOURCE, &["x"]).await.expect_err("unknown");
    assert_eq!((refused.code(), refused.message()), (Code::InvalidArgument, "no device x"));

    let preferred =
        kubelet.preferred_allocation(MPS_RESOURCE, &["a::0", "a::1"], &["a::1"], 2).await.expect("preferred");
    assert_eq!(preferred, ["a::1", "a::0"]);
    for (must_include, size) in [(&[][..], -1), (&[], 3), (&["a::0", "a::1"], 1)] {
        let refused = kubelet
            .preferred_allocation(MPS_RESOURCE, &["a::0", "a::1"], must_include, size)
            .await
            .expect_err("bad numbers");
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    }

    kubelet.pre_start(MPS_RESOURCE, &["a::0"]).await.expect("started");
    let refused = kubelet.pre_start(MPS_RESOURCE, &[]).await.expect_err("not ready");
    assert_eq!((refused.code(), refused.message()), (Code::Unavailable, "the daemon starts"));
}

#[tokio::test]
async fn several_containers_in_one_request_are_answered_in_order() {
    let fixture = Fixture::new();
    let kubelet = fixture.start_kubelet();
    let _plugins = fixture.start_plugins(&[(MPS_RESOURCE, &TestResource::new(&["a::0", "a::1"]))]);
    wait_until_served(&kubelet, MPS_RESOURCE, &["a::0", "a::1"]).await;
    let mut client = kubelet.client(MPS_RESOURCE).expect("a client");
    let container = |id: &str| wire::ContainerAllocateRequest { devices_ids: vec![id.to_owned()] };
    let request =
        |ids: &[&str]| wire::AllocateRequest { container_requests: ids.iter().map(|id| container(id)).collect() };
    let answer = client.allocate(request(&["a::1", "a::0"])).await.expect("allocated").into_inner();
    let ids: Vec<_> = answer.container_responses.iter().map(|response| response.envs["IDS"].as_str()).collect();
    assert_eq!(ids, ["a::1", "a::0"]);
    assert!(client.allocate(request(&[])).await.expect("allocated").into_inner().container_responses.is_empty());
    let refused = client.allocate(request(&["a::1", "x"])).await.expect_err("one is unknown");
    assert_eq!(refused.code(), Code::InvalidArgument);
}

/// Returns an HTTP/2 frame.
fn encode_frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
    let mut frame = vec![length[1], length[2], length[3], kind, flags];
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// Returns the uncompressed headers of a `GetDevicePluginOptions` call with this `:authority`.
fn encode_headers(authority: &str) -> Vec<u8> {
    let text = |text: &str| {
        let mut literal = vec![u8::try_from(text.len()).expect("short")];
        literal.extend(text.as_bytes());
        literal
    };
    [
        vec![0x83, 0x86, 0x04],
        text("/v1beta1.DevicePlugin/GetDevicePluginOptions"),
        vec![0x01],
        text(authority),
        vec![0x0f, 0x10],
        text("application/grpc"),
        vec![0x00],
        text("te"),
        text("trailers"),
    ]
    .concat()
}

const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA_FRAME: u8 = 0;
const HEADERS_FRAME: u8 = 1;
const RESET_FRAME: u8 = 3;
const SETTINGS_FRAME: u8 = 4;
const GOAWAY_FRAME: u8 = 7;

/// Reads frames until one belongs to this stream and is not a window update.
async fn read_frame_of_stream(connection: &mut UnixStream, stream: u32) -> (u8, Vec<u8>) {
    loop {
        let mut head = [0; 9];
        connection.read_exact(&mut head).await.expect("a frame");
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        connection.read_exact(&mut payload).await.expect("the response's payload");
        let of = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
        assert_ne!(head[3], GOAWAY_FRAME, "the connection is closed: {payload:?}");
        if of == stream && head[3] != 8 {
            return (head[3], payload);
        }
    }
}

/// The kubelet sends `localhost` as the authority, and other clients send other names. A path is
/// not a valid authority: h2 resets the call, but keeps the connection.
#[tokio::test]
async fn a_call_with_a_path_as_authority_is_reset_and_its_connection_stays_open() {
    let fixture = Fixture::new();
    let kubelet = fixture.start_kubelet();
    let _plugins = fixture.start_plugins(&[(MPS_RESOURCE, &TestResource::new(&["a::0"]))]);
    let socket = fixture.path().join(wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await.socket);
    let exchange = async {
        let mut connection = UnixStream::connect(&socket).await.expect("a connection");
        let start = [HTTP2_PREFACE.to_vec(), encode_frame(SETTINGS_FRAME, 0, 0, &[])].concat();
        connection.write_all(&start).await.expect("sent");
        let calls = [
            (1, "localhost"),
            (3, "/var/lib/kubelet/device-plugins/x.sock"),
            (5, "%2Fvar%2Fx"),
            (7, "tonic"),
            (9, "localhost"),
        ];
        for (stream, authority) in calls {
            let call = [
                encode_frame(HEADERS_FRAME, 4, stream, &encode_headers(authority)),
                encode_frame(DATA_FRAME, 1, stream, &[0; 5]),
            ]
            .concat();
            connection.write_all(&call).await.expect("sent");
            let (kind, payload) = read_frame_of_stream(&mut connection, stream).await;
            if authority.contains(['/', '%']) {
                assert_eq!((kind, payload.as_slice()), (RESET_FRAME, &[0, 0, 0, 1][..]), "{authority}");
            } else {
                assert_eq!(kind, HEADERS_FRAME, "{authority}");
                // Expect the message, with both options set, and the trailers.
                assert_eq!(
                    read_frame_of_stream(&mut connection, stream).await,
                    (DATA_FRAME, vec![0, 0, 0, 0, 4, 8, 1, 16, 1])
                );
                assert_eq!(read_frame_of_stream(&mut connection, stream).await.0, HEADERS_FRAME);
            }
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, exchange).await.expect("an answer to each call");
}

#[tokio::test]
async fn hostile_connections_do_not_affect_the_kubelet() {
    let fixture = Fixture::new();
    let kubelet = fixture.start_kubelet();
    let _plugins = fixture.start_plugins(&[(MPS_RESOURCE, &TestResource::new(&["a::0"]))]);
    let socket = fixture.path().join(wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await.socket);
    let settings = encode_frame(SETTINGS_FRAME, 0, 0, &[]);
    let call = encode_frame(HEADERS_FRAME, 4, 1, &encode_headers("localhost"));
    let inputs: Vec<Vec<u8>> = vec![
        Vec::new(),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        vec![0xff; 4096],
        HTTP2_PREFACE[..10].to_vec(),
        [HTTP2_PREFACE, &settings[..5]].concat(),
        // A frame header with a length of almost 16 MiB.
        [HTTP2_PREFACE, &settings, &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1][..]].concat(),
        // Truncated headers, and invalid headers.
        [HTTP2_PREFACE, &settings, &call[..20]].concat(),
        [HTTP2_PREFACE, &settings, &encode_frame(HEADERS_FRAME, 4, 1, &[0xff; 64])].concat(),
        // A message that is shorter than its declared length, a message with a declared length of
        // almost 4 GiB, and an invalid message.
        [HTTP2_PREFACE, &settings, &call, &encode_frame(DATA_FRAME, 1, 1, &[0, 0, 0, 0, 9, 1])].concat(),
        [HTTP2_PREFACE, &settings, &call, &encode_frame(DATA_FRAME, 0, 1, &[0, 0xff, 0xff, 0xff, 0xff])].concat(),
        [HTTP2_PREFACE, &settings, &call, &encode_frame(DATA_FRAME, 1, 1, &[0, 0, 0, 0, 2, 0xff, 0xff])].concat(),
    ];
    let mut open = Vec::new();
    for input in &inputs {
        // Test both a connection that closes after the input and one that remains open.
        for stays in [false, true] {
            let mut connection = UnixStream::connect(&socket).await.expect("a connection");
            // Ignore errors, because the server can close the connection before everything is
            // written.
            let _ = connection.write_all(input).await;
            if stays {
                open.push(connection);
            }
        }
    }
    kubelet.allocate(MPS_RESOURCE, &["a::0"]).await.expect("allocated");
    // Open more connections than the limit: they do not affect the kubelet's own connection.
    for _ in 0..200 {
        open.push(UnixStream::connect(&socket).await.expect("a connection"));
    }
    let mut closed = open.pop().expect("a connection is open");
    let read = tokio::time::timeout(TEST_TIMEOUT, closed.read(&mut [0; 1])).await.expect("closed");
    assert!(matches!(&read, Ok(0)) || read.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset));
    kubelet.allocate(MPS_RESOURCE, &["a::0"]).await.expect("allocated");
    drop(open);
    let mut client = connect_until_served(&socket).await;
    let too_long = wire::ContainerAllocateRequest { devices_ids: vec!["x".repeat(2 << 20)] };
    let refused =
        client.allocate(wire::AllocateRequest { container_requests: vec![too_long] }).await.expect_err("2 MiB");
    assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
    assert_eq!(count_registrations(&kubelet, MPS_RESOURCE), 1);
}

async fn connect_until_served(socket: &Path) -> DevicePluginClient<tonic::transport::Channel> {
    let attempt = async {
        loop {
            if let Ok(mut client) = connect_to_plugin(socket).await
                && client.get_device_plugin_options(wire::Empty {}).await.is_ok()
            {
                return client;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, attempt).await.expect("a slot becomes free")
}
