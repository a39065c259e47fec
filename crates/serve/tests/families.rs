//! Tests that peers reach a port on every address over IPv4 and over IPv6.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use cleave_serve::{http, tcp};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

/// Time limit of a request. Longer than any request takes on a busy machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Sends a request. Returns the first line of the answer.
async fn request(address: IpAddr, port: u16) -> std::io::Result<String> {
    let mut stream = TcpStream::connect((address, port)).await?;
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer.lines().next().unwrap_or_default().to_owned())
}

#[tokio::test]
async fn a_port_on_every_address_is_reached_over_both_families() {
    let listener = tcp::listen((Ipv6Addr::UNSPECIFIED, 0).into()).unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let router = Router::new().route("/healthz", get(|| async { "ok" }));
    let server = tokio::spawn(http::serve(listener, router, http::Limits::default(), stop.clone()));
    let mut peers = vec![IpAddr::from(Ipv4Addr::LOCALHOST)];
    // Machines without IPv6 have only the IPv4 substitute. If a setting disables IPv6, the port is
    // bound but no interface has an IPv6 address.
    let has_ipv6 = std::net::TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok();
    if has_ipv6 {
        assert!(address.is_ipv6(), "{address}");
        peers.push(Ipv6Addr::LOCALHOST.into());
    }
    for peer in peers {
        let answer = tokio::time::timeout(TEST_TIMEOUT, request(peer, address.port())).await.unwrap();
        assert_eq!(answer.unwrap(), "HTTP/1.1 200 OK", "over {peer}");
    }
    stop.cancel();
    server.await.unwrap();
}

#[tokio::test]
async fn an_ipv4_address_is_used_as_given_and_a_busy_port_is_an_error() {
    let listener = tcp::listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let address = listener.local_addr().unwrap();
    assert_eq!(address.ip(), Ipv4Addr::LOCALHOST);
    assert_eq!(tcp::listen(address).unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
}
