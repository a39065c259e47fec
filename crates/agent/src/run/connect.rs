//! Creates a client for the API server from inside a pod. The client uses the service account's
//! token and the cluster's CA. The client rereads the files of the token and the CA, because the
//! kubelet renews the token and the cluster may renew the CA.
//!
//! `kube::Client::try_default` does the same, but also supports kubeconfig files. Its code for
//! YAML, `JSONPath`, regular expressions and credential plugins takes 1.5 MiB of memory on each
//! node.
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::{HeaderValue, Request, Uri, header};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::Client;
use kube::client::Body;
use kube::client::middleware::BaseUriLayer;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, SignatureScheme};
use tower::{BoxError, ServiceBuilder};

/// Directory in which Kubernetes mounts the token and the CA.
const SERVICE_ACCOUNT_DIRECTORY: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Maximum time for which the client uses a token before it rereads the file. The kubelet renews a
/// token when a fifth of the token's lifetime remains.
const MAX_TOKEN_AGE: Duration = Duration::from_secs(60);
/// Timeout for connecting. The `kube` crate uses the same value.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout for reads and writes. The `kube` crate uses the same value. A watch ends after 290 s, so
/// a longer silence means that the connection is dead.
const IO_TIMEOUT: Duration = Duration::from_secs(295);

/// Why the agent could not create a client for the API server.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error("{0} is not set: the agent does not run in a pod")]
    NoPod(&'static str),
    #[error("{0:?} is not a valid address of an API server")]
    Address(String, #[source] http::Error),
    #[error("failed to read {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("failed to configure TLS")]
    Tls(#[from] rustls::Error),
}

/// Creates a client for the API server of this pod's cluster.
pub(crate) fn in_cluster_client() -> Result<Client, ConnectError> {
    let variable = |name| std::env::var(name).map_err(|_| ConnectError::NoPod(name));
    let (host, port) = (variable("KUBERNETES_SERVICE_HOST")?, variable("KUBERNETES_SERVICE_PORT")?);
    build_client(&authority(&host, &port), Path::new(SERVICE_ACCOUNT_DIRECTORY))
}

/// Joins host and port. Puts IPv6 addresses in brackets.
fn authority(host: &str, port: &str) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Returns a client that reads the service account's token and CA from files.
fn build_client(authority: &str, account: &Path) -> Result<Client, ConnectError> {
    let uri = Uri::builder().scheme("https").authority(authority).path_and_query("/").build();
    let uri = uri.map_err(|error| ConnectError::Address(authority.to_owned(), error))?;
    let token = ServiceAccountToken::read(account.join("token"))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let ca = CurrentCa { file: account.join("ca.crt"), provider: Arc::clone(&provider) };
    let mut tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(ca))
        .with_no_client_auth();
    // Disable resumption, because a resumed session is not verified against a renewed CA.
    tls.resumption = rustls::client::Resumption::disabled();
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    let https =
        hyper_rustls::HttpsConnectorBuilder::new().with_tls_config(tls).https_only().enable_http1().wrap_connector(tcp);
    let mut connector = hyper_timeout::TimeoutConnector::new(https);
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    connector.set_read_timeout(Some(IO_TIMEOUT));
    connector.set_write_timeout(Some(IO_TIMEOUT));
    let http = legacy::Client::builder(TokioExecutor::new()).build::<_, Body>(connector);
    let service = ServiceBuilder::new()
        .layer(BaseUriLayer::new(uri))
        .map_request(move |mut request: Request<Body>| {
            request.headers_mut().extend(token.current_header().map(|token| (header::AUTHORIZATION, token)));
            request
        })
        .map_err(BoxError::from)
        .service(http);
    Ok(Client::new(service, "default"))
}

/// The service account's token.
#[derive(Clone)]
struct ServiceAccountToken {
    file: Arc<Path>,
    read: Arc<Mutex<(Option<HeaderValue>, Instant)>>,
}

impl ServiceAccountToken {
    fn read(file: PathBuf) -> Result<Self, ConnectError> {
        let text = std::fs::read_to_string(&file);
        let text = text.map_err(|source| ConnectError::Read { path: file.clone(), source })?;
        Ok(Self { file: file.into(), read: Arc::new(Mutex::new((bearer_header(&text), Instant::now()))) })
    }

    /// Returns the header with the token. Rereads the token if it was read more than
    /// [`MAX_TOKEN_AGE`] ago. If the file cannot be read, the last token remains in use.
    fn current_header(&self) -> Option<HeaderValue> {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if read.1.elapsed() >= MAX_TOKEN_AGE {
            let token = std::fs::read_to_string(&self.file).ok().and_then(|text| bearer_header(&text));
            *read = (token.or_else(|| read.0.take()), Instant::now());
        }
        read.0.clone()
    }
}

/// Returns the value of the header `Authorization`. The value is marked as sensitive, so that it is
/// not logged.
fn bearer_header(token: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::try_from(format!("Bearer {}", token.trim())).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// Verifies servers against the CA file. Rereads the file at each handshake, because clusters renew
/// their CA.
struct CurrentCa {
    file: PathBuf,
    provider: Arc<CryptoProvider>,
}

impl CurrentCa {
    /// Returns a verifier with the current content of the CA file.
    fn load_verifier(&self) -> Result<Arc<WebPkiServerVerifier>, rustls::Error> {
        let invalid = |error: &dyn fmt::Display| rustls::Error::General(format!("{}: {error}", self.file.display()));
        let mut roots = rustls::RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(&self.file).map_err(|error| invalid(&error))? {
            roots.add(certificate.map_err(|error| invalid(&error))?)?;
        }
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&self.provider))
            .build()
            .map_err(|error| invalid(&error))
    }
}

impl fmt::Debug for CurrentCa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CurrentCa").field(&self.file).finish()
    }
}

impl ServerCertVerifier for CurrentCa {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.load_verifier()?.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    use rustls::pki_types::PrivateKeyDer;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    use super::*;

    fn new_ca() -> CertifiedIssuer<'static, KeyPair> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    }

    fn tls_acceptor(ca: &CertifiedIssuer<'static, KeyPair>) -> TlsAcceptor {
        let key = KeyPair::generate().unwrap();
        let certificate =
            CertificateParams::new(["127.0.0.1", "::1"].map(str::to_owned)).unwrap().signed_by(&key, ca).unwrap();
        let config = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], PrivateKeyDer::try_from(key.serialize_der()).unwrap())
            .unwrap();
        TlsAcceptor::from(Arc::new(config))
    }

    /// Accepts one connection, answers one request, and returns the head of the request. Fails if
    /// the TLS handshake fails.
    async fn answer_connection(listener: &TcpListener, acceptor: &TlsAcceptor) -> std::io::Result<String> {
        let (stream, _) = listener.accept().await?;
        let mut stream = acceptor.accept(stream).await?;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await?);
        }
        let body = r#"{"major":"1","minor":"36","gitVersion":"v1.36.4","gitCommit":"","gitTreeState":"","buildDate":"","goVersion":"","compiler":"","platform":""}"#;
        let reply = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(reply.as_bytes()).await?;
        stream.shutdown().await?;
        Ok(String::from_utf8_lossy(&head).into_owned())
    }

    #[tokio::test]
    async fn the_current_ca_verifies_the_api_server_and_the_token_is_sent() {
        let account = tempfile::tempdir().unwrap();
        let (first, second) = (new_ca(), new_ca());
        let ca = account.path().join("ca.crt");
        std::fs::write(&ca, first.pem()).unwrap();
        std::fs::write(account.path().join("token"), "one\n").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let client = build_client(&authority("127.0.0.1", &at.port().to_string()), account.path()).unwrap();

        let of_first = tls_acceptor(&first);
        let (version, head) = tokio::join!(client.apiserver_version(), answer_connection(&listener, &of_first));
        assert_eq!(version.unwrap().minor, "36");
        let head = head.unwrap().to_lowercase();
        assert!(head.starts_with("get /version ") && head.contains("authorization: bearer one\r\n"), "{head}");

        let of_second = tls_acceptor(&second);
        let (version, head) = tokio::join!(client.apiserver_version(), answer_connection(&listener, &of_second));
        assert!(version.is_err() && head.is_err(), "a server with a certificate of another CA is not trusted");

        std::fs::write(&ca, format!("{}{}", first.pem(), second.pem())).unwrap();
        let (version, head) = tokio::join!(client.apiserver_version(), answer_connection(&listener, &of_second));
        assert!(version.is_ok() && head.is_ok(), "{version:?}");

        std::fs::write(&ca, "no certificate").unwrap();
        let (version, _) = tokio::join!(client.apiserver_version(), answer_connection(&listener, &of_second));
        assert!(version.is_err(), "no server is trusted without a CA");
    }

    #[tokio::test]
    async fn an_api_server_with_an_ipv6_address_is_verified() {
        let account = tempfile::tempdir().unwrap();
        let ca = new_ca();
        std::fs::write(account.path().join("ca.crt"), ca.pem()).unwrap();
        std::fs::write(account.path().join("token"), "one").unwrap();
        // Skip this test on machines without IPv6.
        let Ok(listener) = TcpListener::bind("[::1]:0").await else { return };
        let port = listener.local_addr().unwrap().port().to_string();
        let client = build_client(&authority("::1", &port), account.path()).unwrap();
        let acceptor = tls_acceptor(&ca);
        let (version, head) = tokio::join!(client.apiserver_version(), answer_connection(&listener, &acceptor));
        assert_eq!(version.unwrap().minor, "36");
        assert!(head.unwrap().starts_with("GET /version "));
    }

    #[test]
    fn a_token_is_read_again_and_kept_if_reading_fails() {
        let account = tempfile::tempdir().unwrap();
        let file = account.path().join("token");
        assert!(matches!(ServiceAccountToken::read(file.clone()), Err(ConnectError::Read { .. })));
        std::fs::write(&file, "one").unwrap();
        let token = ServiceAccountToken::read(file.clone()).unwrap();
        let expire = || token.read.lock().unwrap().1 = Instant::now().checked_sub(MAX_TOKEN_AGE).unwrap();
        std::fs::write(&file, "two").unwrap();
        assert_eq!(token.current_header().unwrap(), "Bearer one", "less than a minute old");
        expire();
        assert_eq!(token.current_header().unwrap(), "Bearer two");
        std::fs::remove_file(&file).unwrap();
        expire();
        assert_eq!(token.current_header().unwrap(), "Bearer two");
        assert!(token.current_header().unwrap().is_sensitive());
    }

    #[test]
    fn ipv6_addresses_get_brackets_and_invalid_addresses_are_errors() {
        assert_eq!(authority("10.0.0.1", "443"), "10.0.0.1:443");
        assert_eq!(authority("fd00::1", "443"), "[fd00::1]:443");
        assert!(matches!(build_client("a b:c", Path::new("/nowhere")), Err(ConnectError::Address(..))));
    }
}
