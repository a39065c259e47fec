//! Tests that silent peers cannot block a port or exhaust the file descriptors of its process.
//!
//! The server runs in a child process with a low limit of open files. To start the child process,
//! this test program runs itself with [`SERVER_TEST_NAME`] as the only test.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use cleave_serve::{descriptors, http};
use rustix::process::{Pid, Resource, Rlimit, Signal, WaitOptions, kill_process, waitpid};
use tokio_util::sync::CancellationToken;

/// Name of the test that runs the server.
const SERVER_TEST_NAME: &str = "run_the_server_for_the_other_tests";
/// Environment variable that makes [`SERVER_TEST_NAME`] run a server. Without the variable, that
/// test does nothing. The value is the time limit for the headers of a request, in milliseconds.
const HEADER_TIMEOUT_VARIABLE: &str = "TEST_SERVE_HEADER_TIMEOUT_MS";
/// Time limit of each read and write. Long enough for a busy machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum number of connections that wait in the kernel's queue until the server accepts them.
const LISTEN_BACKLOG: u32 = 1024;
/// The server's limit of open files. The limit is far lower than the number of silent connections.
const MAX_SERVER_DESCRIPTORS: u64 = 256;

/// HTTP request for the number of the server's open files.
const OPEN_FILES_REQUEST: &[u8] = b"GET /open HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n";

struct ServerProcess {
    process: Child,
    address: SocketAddr,
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn start_server(headers: Duration) -> ServerProcess {
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", SERVER_TEST_NAME, "--nocapture", "--quiet"])
        .env(HEADER_TIMEOUT_VARIABLE, headers.as_millis().to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let address = lines.map_while(Result::ok).find_map(|line| line.split_once("serving ")?.1.trim().parse().ok());
    ServerProcess { process, address: address.unwrap() }
}

#[test]
fn run_the_server_for_the_other_tests() {
    let Ok(headers) = std::env::var(HEADER_TIMEOUT_VARIABLE) else { return };
    let limit = Rlimit { current: Some(MAX_SERVER_DESCRIPTORS), maximum: Some(MAX_SERVER_DESCRIPTORS) };
    rustix::process::setrlimit(Resource::Nofile, limit).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let listener = socket.listen(LISTEN_BACKLOG).unwrap();
        println!("serving {}", listener.local_addr().unwrap());
        let open = || async { descriptors::usage().unwrap().open.to_string() };
        let limits = http::Limits { headers: Duration::from_millis(headers.parse().unwrap()), ..Default::default() };
        let router = Router::new().route("/open", get(open));
        http::serve(listener, router, limits, CancellationToken::new()).await;
    });
}

fn connect(server: &ServerProcess) -> TcpStream {
    let stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(TEST_TIMEOUT)).unwrap();
    stream
}

/// Requests and returns the number of the server's open files.
fn request_open_files(server: &ServerProcess) -> u64 {
    let mut stream = connect(server);
    stream.write_all(OPEN_FILES_REQUEST).unwrap();
    read_open_files(stream)
}

/// Reads and returns the answer to [`OPEN_FILES_REQUEST`].
fn read_open_files(mut stream: TcpStream) -> u64 {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    answer.lines().last().unwrap().parse().unwrap()
}

/// Waits until the server closes a connection. Returns `false` if the server does not close it in
/// time.
fn is_closed(mut stream: &TcpStream) -> bool {
    match stream.read_to_end(&mut Vec::new()) {
        Ok(_) => true,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

#[test]
fn thousands_of_silent_connections_do_not_block_a_server_with_256_descriptors() {
    descriptors::raise_limit();
    // The time limit for headers is longer than the test, so it closes no connections.
    let server = start_server(Duration::from_secs(3600));
    let mut silent = Vec::new();
    for round in 0..5 {
        silent.extend((0..500).map(|_| connect(&server)));
        let open = request_open_files(&server);
        assert!(open < MAX_SERVER_DESCRIPTORS / 2, "round {round}: {open} open files");
    }
    assert!(is_closed(&silent[0]), "the oldest connection");
}

#[test]
fn the_only_request_among_200_simultaneous_connections_is_answered() {
    let server = start_server(Duration::from_secs(3600));
    let pid = Pid::from_child(&server.process);
    for position in [0, 70, 135, 199] {
        // While the server is stopped, connections and requests collect in the kernel's queue.
        kill_process(pid, Signal::STOP).unwrap();
        waitpid(Some(pid), WaitOptions::UNTRACED).unwrap();
        let mut burst: Vec<TcpStream> = (0..200).map(|_| connect(&server)).collect();
        burst[position].write_all(OPEN_FILES_REQUEST).unwrap();
        kill_process(pid, Signal::CONT).unwrap();
        read_open_files(burst.swap_remove(position));
    }
}

#[test]
fn a_connection_that_sends_no_complete_header_is_closed() {
    let server = start_server(Duration::from_millis(200));
    let nothing = connect(&server);
    let mut half = connect(&server);
    half.write_all(b"GET /open HT").unwrap();
    assert!(is_closed(&nothing) && is_closed(&half));
    request_open_files(&server);
}
