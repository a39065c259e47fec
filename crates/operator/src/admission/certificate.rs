//! What the webhook proves to API servers who it is with: made, kept in a Secret and renewed by the
//! operators themselves.
//!
//! Each certificate has a CA of its own, whose key is thrown away when it has signed: nobody can
//! sign another. The Secret has the certificate, its key, and the CAs that API servers are to
//! trust: its own and the one before, so that a replica that still serves the former certificate is
//! trusted as well. [`step`] decides, purely; when a certificate ends is asked of itself, by
//! checking it as a client would at that time.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{RootCertStore, ServerConfig};
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::leader::Claim;

/// How long a certificate is good for.
pub(crate) const LIFE: Duration = Duration::from_secs(90 * 24 * 3600);
/// How long before its end another is made.
pub(crate) const RENEWAL: Duration = Duration::from_secs(30 * 24 * 3600);
/// How much later than ours an API server's clock may be.
const SKEW: Duration = Duration::from_secs(3600);
/// How long API servers are given to learn of another CA before anything is served that needs it.
/// They are told by a watch.
const SETTLE: Duration = Duration::from_secs(2);
/// How often the Secret is looked at, and how often while there is nothing to serve with.
const LOOK: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(1));
/// How long a request may take.
const REQUEST: Duration = Duration::from_secs(4);
/// Keys of the Secret, as in those of type `kubernetes.io/tls`.
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
const AUTHORITIES: &str = "ca.crt";

/// A certificate could not be made or read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The library cannot make it.
    #[error("no certificate could be made")]
    Make(#[source] rcgen::Error),
    /// The Secret lacks a part.
    #[error("the Secret has no {0}")]
    Lacks(&'static str),
    /// A part is not PEM.
    #[error("{0} of the Secret is not what it should be")]
    Pem(&'static str, #[source] rustls::pki_types::pem::Error),
    /// Parts do not belong together, or nothing can be done with them.
    #[error("the Secret's certificate, key and authorities cannot be used")]
    Unusable(#[source] rustls::Error),
    /// Nobody could check the certificate.
    #[error("the Secret's authorities cannot be used")]
    Authorities(#[source] rustls::client::VerifierBuilderError),
}

/// A certificate that fits its key, and the CAs to trust.
#[derive(Debug, Clone)]
pub(crate) struct Material {
    certificate: String,
    key: String,
    /// The certificate's own first.
    authorities: Vec<CertificateDer<'static>>,
    authorities_pem: String,
    served: Arc<CertifiedKey>,
    verifier: Arc<WebPkiServerVerifier>,
}

impl Material {
    /// A certificate for a host, good from `now` on, by a new CA. `before` is trusted for as long
    /// as it is served.
    pub(crate) fn make(host: &str, now: SystemTime, before: Option<&Self>) -> Result<Self, Error> {
        let key = KeyPair::generate().map_err(Error::Make)?;
        let mut leaf = params(vec![host.to_owned()], host.to_owned(), now)?;
        leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        leaf.use_authority_key_identifier_extension = true;
        // Told apart by name too: clients look for a certificate's issuer by it.
        let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut ca = params(Vec::new(), format!("{host} since {since}"), now)?;
        ca.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        ca.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let issuer =
            CertifiedIssuer::self_signed(ca, KeyPair::generate().map_err(Error::Make)?).map_err(Error::Make)?;
        let certificate = leaf.signed_by(&key, &issuer).map_err(Error::Make)?.pem();
        let mut authorities = issuer.pem();
        if let Some(own) = before.and_then(Self::own_authority) {
            authorities.push_str(&own);
        }
        Self::new(certificate, key.serialize_pem(), authorities)
    }

    /// What a Secret holds; nothing where it holds nothing yet.
    pub(crate) fn read(data: &BTreeMap<String, ByteString>) -> Result<Option<Self>, Error> {
        if data.values().all(|value| value.0.is_empty()) {
            return Ok(None);
        }
        let part = |name: &'static str| {
            let bytes = data.get(name).ok_or(Error::Lacks(name))?;
            Ok(String::from_utf8_lossy(&bytes.0).into_owned())
        };
        Self::new(part(CERTIFICATE)?, part(KEY)?, part(AUTHORITIES)?).map(Some)
    }

    /// What a Secret is to hold.
    pub(crate) fn data(&self) -> BTreeMap<String, ByteString> {
        let parts = [(CERTIFICATE, &self.certificate), (KEY, &self.key), (AUTHORITIES, &self.authorities_pem)];
        parts.into_iter().map(|(name, text)| (name.to_owned(), ByteString(text.clone().into_bytes()))).collect()
    }

    fn new(certificate: String, key: String, authorities_pem: String) -> Result<Self, Error> {
        let chain = certificates(&certificate, CERTIFICATE)?;
        let authorities = certificates(&authorities_pem, AUTHORITIES)?;
        let private = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|error| Error::Pem(KEY, error))?;
        let provider = provider();
        let served = CertifiedKey::from_der(chain, private, &provider).map_err(Error::Unusable)?;
        let mut roots = RootCertStore::empty();
        for authority in &authorities {
            roots.add(authority.clone()).map_err(Error::Unusable)?;
        }
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .map_err(Error::Authorities)?;
        Ok(Self { certificate, key, authorities, authorities_pem, served: Arc::new(served), verifier })
    }

    /// What connections are served with.
    pub(crate) fn certified(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.served)
    }

    /// Whether a client that trusts the CAs takes the certificate for the host's at that time.
    pub(crate) fn is_trusted(&self, host: &str, at: SystemTime) -> bool {
        let (Ok(name), Ok(since)) = (ServerName::try_from(host), at.duration_since(SystemTime::UNIX_EPOCH)) else {
            return false;
        };
        let at = UnixTime::since_unix_epoch(since);
        self.served
            .end_entity_cert()
            .is_ok_and(|certificate| self.verifier.verify_server_cert(certificate, &[], &name, &[], at).is_ok())
    }

    /// Whether who trusts `bundle` trusts all that this one wants trusted.
    pub(crate) fn is_covered_by(&self, bundle: Option<&ByteString>) -> bool {
        let trusted: Vec<_> = bundle
            .into_iter()
            .flat_map(|bundle| CertificateDer::pem_slice_iter(&bundle.0).filter_map(Result::ok))
            .collect();
        self.authorities.iter().all(|authority| trusted.contains(authority))
    }

    /// The CA of this certificate alone, as PEM.
    fn own_authority(&self) -> Option<String> {
        const END: &str = "-----END CERTIFICATE-----\n";
        let pem = self.authorities_pem.replace("\r\n", "\n");
        pem.find(END).map(|end| pem[..end + END.len()].to_owned())
    }
}

fn params(names: Vec<String>, common_name: String, now: SystemTime) -> Result<CertificateParams, Error> {
    let mut params = CertificateParams::new(names).map_err(Error::Make)?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.not_before = (now - SKEW).into();
    params.not_after = (now + LIFE).into();
    Ok(params)
}

fn certificates(pem: &str, part: &'static str) -> Result<Vec<CertificateDer<'static>>, Error> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    found
        .map_err(|error| Error::Pem(part, error))
        .and_then(|found| if found.is_empty() { Err(Error::Lacks(part)) } else { Ok(found) })
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// What to do about the certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Serve with what is stored.
    Serve,
    /// Make another, and serve with it once it is trusted.
    Renew,
    /// Nobody trusts what is stored: make another at once.
    Make,
}

/// Decides what to do about what is stored.
///
/// The leader alone renews, since others would take back what it tells API servers before they know
/// it. Where there is nothing to serve with any replica makes it, and of several the first to write
/// wins: while the first replica that needs one is rolled out, the leader may be one that does not
/// know of any.
pub(crate) fn step(stored: Option<&Material>, host: &str, now: SystemTime, leads: bool) -> Step {
    match stored {
        Some(stored) if stored.is_trusted(host, now) => {
            if leads && !stored.is_trusted(host, now + RENEWAL) {
                Step::Renew
            } else {
                Step::Serve
            }
        }
        _ => Step::Make,
    }
}

/// What is served with at the moment; nothing at first.
pub(crate) type Served = watch::Receiver<Option<Arc<CertifiedKey>>>;

/// Gives each connection what is served with when it begins.
#[derive(Debug)]
struct Current(Served);

impl ResolvesServerCert for Current {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.borrow().clone()
    }
}

/// How connections are encrypted.
///
/// # Errors
/// The library cannot do it at all.
pub(crate) fn tls(served: Served) -> Result<Arc<ServerConfig>, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(Current(served)));
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// The certificate could not be looked after.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error("the API server refused, or could not be reached")]
    Api(#[from] kube::Error),
    #[error("the API server did not answer within {} s", REQUEST.as_secs())]
    Timeout,
    #[error("the Secret {0} is not there: it is part of the release, and `helm upgrade` makes it again")]
    NoSecret(String),
    #[error(transparent)]
    Certificate(#[from] Error),
}

/// Keeps the Secret, what API servers trust, and what is served with.
pub(crate) struct Keeper {
    secrets: Api<Secret>,
    webhooks: Api<MutatingWebhookConfiguration>,
    /// Of the Secret, the Service and the configuration alike.
    name: String,
    /// What API servers call the Service.
    host: String,
    claim: Claim,
    /// Last stored, as long as it could be read.
    known: Option<Material>,
    served: watch::Sender<Option<Arc<CertifiedKey>>>,
}

impl Keeper {
    /// A keeper, and what it serves with.
    pub(crate) fn new(client: &kube::Client, namespace: &str, name: String, claim: Claim) -> (Self, Served) {
        let (served, receiver) = watch::channel(None);
        let host = format!("{name}.{namespace}.svc");
        let secrets = Api::namespaced(client.clone(), namespace);
        (Self { secrets, webhooks: Api::all(client.clone()), name, host, claim, known: None, served }, receiver)
    }

    /// Looks after the certificate until `stop`.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut turned = self.claim.clone();
        loop {
            if let Err(error) = self.turn(SystemTime::now(), self.claim.is_current()).await {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "the webhook's certificate is not looked after"
                );
            }
            let pause = if self.served.borrow().is_some() { LOOK.0 } else { LOOK.1 };
            // All cancel-safe: a token, a watch channel and a timer.
            tokio::select! {
                () = stop.cancelled() => return,
                () = turned.turned() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// One look at what is stored, by a process that leads or does not.
    async fn turn(&mut self, now: SystemTime, leads: bool) -> Result<(), Trouble> {
        let secret = within(self.secrets.get_opt(&self.name)).await?;
        let secret = secret.ok_or_else(|| Trouble::NoSecret(self.name.clone()))?;
        let stored = Material::read(secret.data.as_ref().unwrap_or(&BTreeMap::new())).unwrap_or_else(|error| {
            tracing::warn!(error = &error as &dyn std::error::Error, "what is stored cannot be served with");
            None
        });
        let material = match step(stored.as_ref(), &self.host, now, leads) {
            Step::Serve => stored,
            step => Some(self.replace(secret, stored, step, now).await?),
        };
        if let Some(material) = material {
            self.cover(&material).await?;
            self.served.send_if_modified(|served| {
                let differs = served.as_ref().is_none_or(|served| served.cert != material.served.cert);
                *served = Some(material.certified());
                differs
            });
            self.known = Some(material);
        }
        Ok(())
    }

    /// Makes another certificate and stores it.
    async fn replace(
        &self,
        mut secret: Secret,
        stored: Option<Material>,
        step: Step,
        now: SystemTime,
    ) -> Result<Material, Trouble> {
        // What others still serve with: what was stored, or was before somebody spoiled it.
        let before = stored.or_else(|| self.known.clone()).filter(|before| before.is_trusted(&self.host, now));
        let material = Material::make(&self.host, now, before.as_ref())?;
        tracing::info!(secret = self.name, ?step, "the webhook gets another certificate");
        if step == Step::Renew || before.is_some() {
            self.cover(&material).await?;
            tokio::time::sleep(SETTLE).await;
        }
        secret.data = Some(material.data());
        // The version that was read goes with it: of several one wins, and the others find what it
        // wrote.
        within(self.secrets.replace(&self.name, &PostParams::default(), &secret)).await?;
        Ok(material)
    }

    /// Has API servers trust the certificate's CAs.
    async fn cover(&self, material: &Material) -> Result<(), Trouble> {
        let configured = within(self.webhooks.get(&self.name)).await?;
        for webhook in configured.webhooks.unwrap_or_default() {
            if material.is_covered_by(webhook.client_config.ca_bundle.as_ref()) {
                continue;
            }
            let bundle = ByteString(material.authorities_pem.clone().into_bytes());
            let change = json!({"webhooks": [{"name": webhook.name, "clientConfig": {"caBundle": bundle}}]});
            within(self.webhooks.patch(&self.name, &PatchParams::default(), &Patch::Strategic(change))).await?;
            tracing::info!(configuration = self.name, "API servers are told which certificate to trust");
        }
        Ok(())
    }
}

async fn within<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, Trouble> {
    Ok(tokio::time::timeout(REQUEST, request).await.map_err(|_| Trouble::Timeout)??)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: &str = "cleave-webhook.cleave-system.svc";

    /// Whole seconds, as certificates have them.
    fn now() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000)
    }

    fn made() -> Material {
        Material::make(HOST, now(), None).unwrap()
    }

    #[test]
    fn a_certificate_is_good_for_its_host_and_its_time() {
        let made = made();
        let minute = Duration::from_secs(60);
        for at in [now(), now() - SKEW + minute, now() + LIFE - minute] {
            assert!(made.is_trusted(HOST, at));
            assert!(!made.is_trusted("cleave-webhook.other.svc", at));
        }
        for at in [now() - SKEW - minute, now() + LIFE + minute, SystemTime::UNIX_EPOCH - minute] {
            assert!(!made.is_trusted(HOST, at));
        }
    }

    #[test]
    fn what_is_stored_is_what_was_made() {
        let (made, other) = (made(), made());
        let read = Material::read(&made.data()).unwrap().unwrap();
        assert_eq!(read.data(), made.data());
        assert!(read.is_trusted(HOST, now()));
        assert!(Material::read(&BTreeMap::new()).unwrap().is_none());
        let emptied = made.data().into_keys().map(|key| (key, ByteString(Vec::new()))).collect();
        assert!(Material::read(&emptied).unwrap().is_none());
        for part in [CERTIFICATE, KEY, AUTHORITIES] {
            for spoiled in
                [&b""[..], b"\xff", b"none", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
            {
                let mut data = made.data();
                data.insert(part.to_owned(), ByteString(spoiled.to_vec()));
                assert!(Material::read(&data).is_err(), "{part}: {spoiled:?}");
            }
            let mut data = made.data();
            data.remove(part);
            assert!(Material::read(&data).is_err(), "no {part}");
        }
        // A key, or a CA, of another.
        let mut data = made.data();
        data.insert(KEY.to_owned(), other.data()[KEY].clone());
        assert!(Material::read(&data).is_err());
        let mut data = made.data();
        data.insert(AUTHORITIES.to_owned(), other.data()[AUTHORITIES].clone());
        assert!(!Material::read(&data).unwrap().unwrap().is_trusted(HOST, now()));
    }

    #[test]
    fn the_certificate_before_is_trusted_while_it_may_be_served() {
        let first = made();
        let second = Material::make(HOST, now() + RENEWAL, Some(&first)).unwrap();
        let third = Material::make(HOST, now() + LIFE, Some(&second)).unwrap();
        let bundle = |material: &Material| material.data()[AUTHORITIES].clone();
        // As a client that trusts the second's authorities sees the first.
        let mut served = second.data();
        served.insert(CERTIFICATE.to_owned(), first.data()[CERTIFICATE].clone());
        served.insert(KEY.to_owned(), first.data()[KEY].clone());
        assert!(Material::read(&served).unwrap().unwrap().is_trusted(HOST, now() + RENEWAL));
        assert!(first.is_covered_by(Some(&bundle(&second))));
        assert!(!second.is_covered_by(Some(&bundle(&first))), "the second is not known yet");
        assert!(!first.is_covered_by(Some(&bundle(&third))), "CAs do not pile up");
        assert_eq!(third.authorities.len(), 2);
        for spoiled in [None, Some(ByteString(Vec::new())), Some(ByteString(b"none".to_vec()))] {
            assert!(!first.is_covered_by(spoiled.as_ref()));
        }
    }

    #[test]
    fn it_is_renewed_by_the_leader_and_made_by_whoever_needs_it() {
        let made = made();
        let due = now() + LIFE - RENEWAL;
        for (at, leads, expected) in [
            (now(), true, Step::Serve),
            (now(), false, Step::Serve),
            (due - SKEW, true, Step::Serve),
            (due + SKEW, true, Step::Renew),
            (due + SKEW, false, Step::Serve),
            (now() + LIFE + SKEW, true, Step::Make),
            (now() + LIFE + SKEW, false, Step::Make),
            (now() - 2 * SKEW, false, Step::Make),
        ] {
            // Asked about as it was stored, and by a clock of its own.
            let step = step(Some(&made), HOST, at, leads);
            assert_eq!(step, expected, "{:?} after it was made", at.duration_since(now()));
        }
        assert_eq!(step(None, HOST, now(), false), Step::Make);
        assert_eq!(step(Some(&made), "another.svc", now(), false), Step::Make);
    }

    mod kept {
        use http::{Request, Response, StatusCode};
        use kube::client::Body;
        use serde_json::Value;
        use tower_test::mock::{self, Handle};

        use super::*;
        use crate::leader::Elector;

        type Server = Handle<Request<Body>, Response<Body>>;

        const SECRET: &str = "/api/v1/namespaces/cleave-system/secrets/cleave-webhook";
        const WEBHOOK: &str = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/cleave-webhook";

        fn keeper() -> (Keeper, Served, Server) {
            let (service, server) = mock::pair();
            let client = kube::Client::new(service, "default");
            let (_, claim) = Elector::new(Api::namespaced(client.clone(), "default"), "l".into(), "me".into());
            let (keeper, served) = Keeper::new(&client, "cleave-system", "cleave-webhook".into(), claim);
            (keeper, served, server)
        }

        fn secret(data: &BTreeMap<String, ByteString>) -> Value {
            json!({"metadata": {"name": "cleave-webhook", "resourceVersion": "7"}, "data": data})
        }

        fn webhook(bundle: Option<&ByteString>) -> Value {
            let mut webhook = json!({"name": "gate.cleave.dev", "admissionReviewVersions": ["v1"], "sideEffects": "None",
                "clientConfig": {"service": {"namespace": "cleave-system", "name": "cleave-webhook"}}});
            if let Some(bundle) = bundle {
                webhook["clientConfig"]["caBundle"] = json!(bundle);
            }
            json!({"metadata": {"name": "cleave-webhook"}, "webhooks": [webhook]})
        }

        /// What comes over the wire, each request answered as told, and nothing else. Gives the
        /// bodies.
        async fn wire(server: &mut Server, expected: Vec<(&str, &str, StatusCode, Value)>) -> Vec<Value> {
            let mut bodies = Vec::new();
            for (method, path, status, answer) in expected {
                let (request, reply) = server.next_request().await.unwrap();
                let (parts, body) = request.into_parts();
                assert_eq!((parts.method.as_str(), parts.uri.path()), (method, path));
                let bytes = body.collect_bytes().await.unwrap();
                bodies.push(serde_json::from_slice(&bytes).unwrap_or(Value::Null));
                let answer = Body::from(answer.to_string().into_bytes());
                reply.send_response(Response::builder().status(status).body(answer).unwrap());
            }
            bodies
        }

        fn stored(body: &Value) -> Material {
            let data: BTreeMap<String, ByteString> = serde_json::from_value(body["data"].clone()).unwrap();
            Material::read(&data).unwrap().unwrap()
        }

        fn conflict() -> Value {
            json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "changed", "reason": "Conflict", "code": 409})
        }

        #[tokio::test(start_paused = true)]
        async fn the_first_replica_makes_it_and_makes_it_known() {
            let (mut keeper, served, mut server) = keeper();
            let empty = secret(&BTreeMap::new());
            let (turned, bodies) = tokio::join!(
                keeper.turn(now(), false),
                wire(
                    &mut server,
                    vec![
                        ("GET", SECRET, StatusCode::OK, empty.clone()),
                        ("PUT", SECRET, StatusCode::OK, empty),
                        ("GET", WEBHOOK, StatusCode::OK, webhook(None)),
                        ("PATCH", WEBHOOK, StatusCode::OK, webhook(None)),
                    ]
                )
            );
            turned.unwrap();
            assert_eq!(bodies[1]["metadata"]["resourceVersion"], "7", "of two that make one, one wins");
            let made = stored(&bodies[1]);
            assert!(made.is_trusted(HOST, now() + RENEWAL));
            let change = &bodies[3]["webhooks"][0];
            assert_eq!(change["name"], "gate.cleave.dev");
            assert_eq!(change["clientConfig"]["caBundle"], bodies[1]["data"][AUTHORITIES]);
            assert_eq!(served.borrow().as_ref().unwrap().cert, made.served.cert);
        }

        #[tokio::test(start_paused = true)]
        async fn who_comes_second_serves_what_the_first_made() {
            let (mut keeper, served, mut server) = keeper();
            let (turned, _) = tokio::join!(
                keeper.turn(now(), true),
                wire(
                    &mut server,
                    vec![
                        ("GET", SECRET, StatusCode::OK, secret(&BTreeMap::new())),
                        ("PUT", SECRET, StatusCode::CONFLICT, conflict()),
                    ]
                )
            );
            turned.unwrap_err();
            assert!(served.borrow().is_none());
            let made = made();
            let (turned, _) = tokio::join!(
                keeper.turn(now(), true),
                wire(
                    &mut server,
                    vec![
                        ("GET", SECRET, StatusCode::OK, secret(&made.data())),
                        ("GET", WEBHOOK, StatusCode::OK, webhook(Some(&made.data()[AUTHORITIES]))),
                    ]
                )
            );
            turned.unwrap();
            assert_eq!(served.borrow().as_ref().unwrap().cert, made.served.cert);
        }

        #[tokio::test(start_paused = true)]
        async fn it_is_known_before_it_is_served_when_it_is_renewed() {
            let (mut keeper, served, mut server) = keeper();
            let old = made();
            let due = now() + LIFE - RENEWAL + SKEW;
            let known = webhook(Some(&old.data()[AUTHORITIES]));
            // Who does not lead goes on with what there is.
            let (turned, _) = tokio::join!(
                keeper.turn(due, false),
                wire(
                    &mut server,
                    vec![
                        ("GET", SECRET, StatusCode::OK, secret(&old.data())),
                        ("GET", WEBHOOK, StatusCode::OK, known.clone()),
                    ]
                )
            );
            turned.unwrap();
            assert_eq!(served.borrow().as_ref().unwrap().cert, old.served.cert);
            let (turned, bodies) = tokio::join!(
                keeper.turn(due, true),
                wire(
                    &mut server,
                    vec![
                        ("GET", SECRET, StatusCode::OK, secret(&old.data())),
                        ("GET", WEBHOOK, StatusCode::OK, known.clone()),
                        ("PATCH", WEBHOOK, StatusCode::OK, known.clone()),
                        ("PUT", SECRET, StatusCode::OK, secret(&old.data())),
                        ("GET", WEBHOOK, StatusCode::OK, known.clone()),
                        ("PATCH", WEBHOOK, StatusCode::OK, known),
                    ]
                )
            );
            turned.unwrap();
            let new = stored(&bodies[3]);
            let told: ByteString =
                serde_json::from_value(bodies[2]["webhooks"][0]["clientConfig"]["caBundle"].clone()).unwrap();
            assert!(new.is_covered_by(Some(&told)) && old.is_covered_by(Some(&told)));
            assert_eq!(served.borrow().as_ref().unwrap().cert, new.served.cert);
        }

        #[tokio::test(start_paused = true)]
        async fn what_is_served_outlives_what_was_stored() {
            let (mut keeper, served, mut server) = keeper();
            let old = made();
            let known = webhook(Some(&old.data()[AUTHORITIES]));
            let (turned, _) = tokio::join!(
                keeper.turn(now(), false),
                wire(
                    &mut server,
                    vec![
                        ("GET", SECRET, StatusCode::OK, secret(&old.data())),
                        ("GET", WEBHOOK, StatusCode::OK, known.clone()),
                    ]
                )
            );
            turned.unwrap();
            let mut spoiled = old.data();
            spoiled.insert(CERTIFICATE.to_owned(), ByteString(b"none".to_vec()));
            let (turned, bodies) = tokio::join!(
                keeper.turn(now(), false),
                wire(
                    &mut server,
                    vec![
                        ("GET", SECRET, StatusCode::OK, secret(&spoiled)),
                        ("GET", WEBHOOK, StatusCode::OK, known.clone()),
                        ("PATCH", WEBHOOK, StatusCode::OK, known),
                        ("PUT", SECRET, StatusCode::CONFLICT, conflict()),
                    ]
                )
            );
            turned.unwrap_err();
            let told: ByteString =
                serde_json::from_value(bodies[2]["webhooks"][0]["clientConfig"]["caBundle"].clone()).unwrap();
            assert!(old.is_covered_by(Some(&told)), "others serve it still");
            assert_eq!(served.borrow().as_ref().unwrap().cert, old.served.cert);
            let gone =
                json!({"kind": "Status", "status": "Failure", "message": "gone", "reason": "NotFound", "code": 404});
            let (turned, _) = tokio::join!(
                keeper.turn(now(), true),
                wire(&mut server, vec![("GET", SECRET, StatusCode::NOT_FOUND, gone)])
            );
            assert!(turned.unwrap_err().to_string().contains("helm upgrade"));
            assert!(served.borrow().is_some());
        }
    }
}
