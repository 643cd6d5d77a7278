//! What a pod's status and the word of pod-events mean together: a pure function, and a table of it.

use std::time::{Duration, SystemTime};

use crate::{
    broken::Broken,
    word::{Place, Standing, Word},
};

/// Times of containers are told to the second, and the kubelet's clock is the node's: a run that began so much later than
/// the rules came had them from its first moment on.
const CLEARLY: Duration = Duration::from_secs(2);

/// How a pod is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Diagnosis {
    /// Nothing is missing; whether pod-events says that the pod is redirected.
    Well(bool),
    /// It cannot be told now: what was known stays.
    Unsure,
    /// Its init container has failed, and its redirection has come since: the next run will pass.
    Mended,
    /// It lacks redirection, which may come.
    Lacks(Lack),
    /// It will not have redirection where it is.
    Hopeless(Hopeless),
}

/// Redirection that may come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lack {
    /// Whether an init container has failed for want of it: the pod does not serve.
    pub has_failed: bool,
    /// Whether a proxy in the pod is left out. Otherwise the node's ztunnel is, and then it is often all pods at once.
    pub has_proxy: bool,
    /// Whether pod-events works on it: a successor of this pod would fare no worse.
    pub is_known: bool,
    /// Why it is not there, for people.
    pub why: String,
}

/// Why redirection will not come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hopeless {
    /// The init container has failed again although redirection was there. A successor of this pod may fare better.
    Again(String),
    /// The pod is not to be redirected at all, and its successor would not be either.
    Unwanted(String),
}

/// What both say of a pod that has not ended and is not being deleted.
pub fn diagnose(broken: Option<&Broken>, word: &Word) -> Diagnosis {
    match broken {
        Some(broken) => of_broken(broken, word),
        None => of_running(word),
    }
}

fn of_running(word: &Word) -> Diagnosis {
    match word {
        Word::Away | Word::Stranger | Word::Undecided => Diagnosis::Unsure,
        Word::Unwanted(_) => Diagnosis::Well(false),
        Word::Wanted(Standing { has_proxy, place }) => match place {
            Place::In(_) => Diagnosis::Well(true),
            Place::Leaving => Diagnosis::Well(false),
            Place::Out(why) => Diagnosis::Lacks(Lack {
                has_failed: false,
                has_proxy: *has_proxy,
                is_known: true,
                why: why_not(why),
            }),
        },
    }
}

fn of_broken(broken: &Broken, word: &Word) -> Diagnosis {
    let lacks = |is_known: bool, why: String| {
        Diagnosis::Lacks(Lack {
            has_failed: true,
            has_proxy: true,
            is_known,
            why,
        })
    };
    match word {
        Word::Away => lacks(false, "pod-events is not heard".to_owned()),
        Word::Stranger => lacks(false, "pod-events does not know the pod".to_owned()),
        Word::Undecided => lacks(
            false,
            "pod-events cannot tell whether the pod is to be redirected".to_owned(),
        ),
        Word::Unwanted(reason) => {
            let why = format!(
                "pod-events does not redirect the pod ({reason}). {}",
                reason.remedy()
            );
            Diagnosis::Hopeless(Hopeless::Unwanted(why))
        }
        Word::Wanted(Standing { place, .. }) => match place {
            Place::In(since) if has_failed_since(broken, *since) => {
                let Broken {
                    container, message, ..
                } = broken;
                let why = format!(
                    "{container} failed again although the pod is redirected: {}",
                    first_line(message)
                );
                Diagnosis::Hopeless(Hopeless::Again(why))
            }
            Place::In(_) => Diagnosis::Mended,
            Place::Leaving => Diagnosis::Unsure,
            Place::Out(why) => lacks(true, why_not(why)),
        },
    }
}

fn has_failed_since(broken: &Broken, since: Option<SystemTime>) -> bool {
    let (Some(began), Some(since)) = (broken.began, since) else {
        return false;
    };
    began
        .duration_since(since)
        .is_ok_and(|later| later >= CLEARLY)
}

fn why_not(failure: &str) -> String {
    if failure.is_empty() {
        "pod-events has not redirected it yet".to_owned()
    } else {
        format!("pod-events could not redirect it: {failure}")
    }
}

/// A container's last words may be many.
fn first_line(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    let short: String = line.chars().take(200).collect();
    if short.is_empty() {
        "it said nothing".to_owned()
    } else {
        short
    }
}

#[cfg(test)]
mod tests {
    use inpod_types::Reason;

    use super::*;

    fn at(second: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(second)
    }

    fn failed(second: u64) -> Broken {
        Broken {
            container: "istio-validation".to_owned(),
            exit_code: 126,
            message: "IPv6 is not redirected\nsecond line".to_owned(),
            began: Some(at(second)),
        }
    }

    fn wanted(has_proxy: bool, place: Place) -> Word {
        Word::Wanted(Standing { has_proxy, place })
    }

    /// A word for each diagnosis.
    fn name(diagnosis: &Diagnosis) -> &'static str {
        match diagnosis {
            Diagnosis::Well(true) => "redirected",
            Diagnosis::Well(false) => "well",
            Diagnosis::Unsure => "unsure",
            Diagnosis::Mended => "mended",
            Diagnosis::Lacks(Lack {
                has_failed: true,
                is_known: true,
                ..
            }) => "failed, may come",
            Diagnosis::Lacks(Lack {
                has_failed: true,
                is_known: false,
                ..
            }) => "failed, who knows",
            Diagnosis::Lacks(Lack {
                has_proxy: true, ..
            }) => "runs without its proxy",
            Diagnosis::Lacks(_) => "runs without ztunnel",
            Diagnosis::Hopeless(Hopeless::Again(_)) => "failed again",
            Diagnosis::Hopeless(Hopeless::Unwanted(_)) => "unwanted",
        }
    }

    #[test]
    fn every_pair_of_a_status_and_a_word_has_its_diagnosis() {
        let out = || Place::Out("the kernel refused".to_owned());
        let rows = [
            // The word, and what it means of a pod that runs and of one whose container failed at second 100.
            (Word::Away, "unsure", "failed, who knows"),
            (Word::Stranger, "unsure", "failed, who knows"),
            (Word::Undecided, "unsure", "failed, who knows"),
            (Word::Unwanted(Reason::NotSelected), "well", "unwanted"),
            (
                wanted(true, out()),
                "runs without its proxy",
                "failed, may come",
            ),
            (
                wanted(false, out()),
                "runs without ztunnel",
                "failed, may come",
            ),
            (wanted(true, Place::Leaving), "well", "unsure"),
            (wanted(true, Place::In(None)), "redirected", "mended"),
            (
                wanted(true, Place::In(Some(at(101)))),
                "redirected",
                "mended",
            ),
            (
                wanted(true, Place::In(Some(at(99)))),
                "redirected",
                "mended",
            ),
            (
                wanted(true, Place::In(Some(at(98)))),
                "redirected",
                "failed again",
            ),
        ];
        for (word, of_running, of_failed) in rows {
            assert_eq!(name(&diagnose(None, &word)), of_running, "{word:?}");
            assert_eq!(
                name(&diagnose(Some(&failed(100)), &word)),
                of_failed,
                "{word:?}"
            );
        }
    }

    #[test]
    fn a_container_whose_time_nobody_tells_has_not_failed_again() {
        let mut broken = failed(100);
        broken.began = None;
        let word = wanted(true, Place::In(Some(at(0))));
        assert_eq!(diagnose(Some(&broken), &word), Diagnosis::Mended);
    }

    #[test]
    fn why_is_said_in_the_words_of_who_knows() {
        let why = |diagnosis: Diagnosis| match diagnosis {
            Diagnosis::Lacks(lack) => lack.why,
            Diagnosis::Hopeless(Hopeless::Again(why) | Hopeless::Unwanted(why)) => why,
            Diagnosis::Well(_) | Diagnosis::Unsure | Diagnosis::Mended => String::new(),
        };
        let of = |word: &Word| why(diagnose(Some(&failed(100)), word));
        assert!(of(&wanted(true, Place::Out("no table".to_owned()))).contains("no table"));
        assert!(of(&wanted(true, Place::Out(String::new()))).contains("not redirected it yet"));
        let again = of(&wanted(true, Place::In(Some(at(1)))));
        assert!(
            again.contains("IPv6") && !again.contains("second line"),
            "{again}"
        );
        let unwanted = of(&Word::Unwanted(Reason::NamespaceExcluded));
        assert!(
            unwanted.contains("NAMESPACE_EXCLUDED") && unwanted.contains("excludeNamespaces"),
            "{unwanted}"
        );
    }
}
