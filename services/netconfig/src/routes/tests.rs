use super::*;

/// Any protocol but inpod's, such as RTPROT_BOOT.
const FOREIGN: u8 = 3;

fn own_item(routing: &Routing, need: Need) -> Item {
    routing.item(need).unwrap()
}

fn rule_of(item: Item) -> IpRule {
    match item {
        Item::Rule(rule) => rule,
        Item::Address | Item::Route(_) => panic!("{item} is no rule"),
    }
}

fn with(items: impl IntoIterator<Item = Item>) -> Routing {
    let mut routing = Routing::default();
    for item in items {
        add(&mut routing, item);
    }
    routing
}

fn add(routing: &mut Routing, item: Item) {
    match item {
        Item::Address => routing.address = Some(PROTOCOL),
        Item::Route(route) => routing.routes.push(SeenRoute {
            route,
            is_complete: true,
        }),
        Item::Rule(rule) => routing.rules.push(SeenRule {
            rule,
            is_complete: true,
        }),
    }
}

fn foreign_rule(priority: u32, table: u32, mark: Option<Mark>) -> Item {
    Item::Rule(IpRule {
        family: Family::V4,
        priority,
        table,
        protocol: FOREIGN,
        mark,
        arrives_by: None,
        to: None,
    })
}

fn foreign_route(family: Family, table: u32) -> Item {
    Item::Route(Route {
        family,
        table,
        protocol: FOREIGN,
        is_local: false,
        to: None,
        interface: 2,
    })
}

const RULE: Need = (Family::V4, Part::Rule(Recipient::Ztunnel));

/// Returns priority and table of the rule for replies to ztunnel.
fn chosen(routing: &Routing) -> (u32, u32) {
    let rule = rule_of(own_item(routing, RULE));
    (rule.priority, rule.table)
}

#[test]
fn routes_and_addresses_are_lost_with_lo_and_ip_rules_are_not() {
    for form in Form::ALL {
        let needs = needed(form, &Family::ALL);
        let routing = Routing::default().with_loopback_items(&needs);
        for item in routing.items(&needs).unwrap() {
            assert_eq!(routing.has(&item), !matches!(item, Item::Rule(_)), "{item}");
        }
    }
}

#[test]
fn each_form_needs_its_own_and_rules_come_after_routes() {
    let described = |form, families: &[Family]| -> Vec<String> {
        let items = Routing::default().items(&needed(form, families)).unwrap();
        items.iter().map(ToString::to_string).collect()
    };
    assert_eq!(
        described(Form::Ambient, &Family::ALL),
        [
            "IPv4 route `local default dev lo table 10500`",
            "IPv6 route `local default dev lo table 10500`",
            "IPv4 ip rule `fwmark 0x111/0xfff pref 500 lookup 10500`",
            "IPv6 ip rule `fwmark 0x111/0xfff pref 500 lookup 10500`",
        ]
    );
    assert_eq!(described(Form::Sidecar, &[Family::V4]), [""; 0]);
    let address = "IPv6 address `::6/128 dev lo`";
    assert_eq!(described(Form::Sidecar, &Family::ALL), [address]);
    let by_tproxy = described(Form::SidecarByTproxy, &Family::ALL);
    assert_eq!(by_tproxy.len(), 5);
    assert_eq!(by_tproxy[0], address);
    assert_eq!(
        by_tproxy[4],
        "IPv6 ip rule `fwmark 0x53b/0xfff pref 500 lookup 10501`"
    );
}

#[test]
fn a_table_that_others_use_in_any_family_is_not_taken() {
    assert_eq!(chosen(&with([foreign_route(Family::V6, 10_500)])).1, 10_502);
    let looked_up = [foreign_rule(32_000, 10_500, Some(Mark::new(1, 1).unwrap()))];
    assert_eq!(chosen(&with(looked_up)).1, 10_502);
    // Other tables may be in use.
    assert_eq!(chosen(&with([foreign_route(Family::V4, 100)])).1, 10_500);
}

#[test]
fn a_table_in_use_is_kept_until_others_use_it() {
    let mut routing = with([foreign_route(Family::V4, 10_500)]);
    let item = own_item(&routing, RULE);
    add(&mut routing, item);
    routing.routes.clear();
    assert_eq!(chosen(&routing).1, 10_502);
    add(&mut routing, foreign_route(Family::V4, 10_502));
    assert_eq!(chosen(&routing).1, 10_500);
}

#[test]
fn without_a_free_table_the_foreign_use_is_named() {
    let routing = with(TABLES.map(|table| foreign_route(Family::V6, table)));
    let error = routing.item(RULE).unwrap_err().to_string();
    assert!(error.contains("an IPv6 route in table 10500"), "{error}");
}

#[test]
fn the_priority_is_before_foreign_rules_that_take_the_packets() {
    let from_all = foreign_rule(52, 7, None);
    assert_eq!(chosen(&with([from_all])).0, 51);
    let same_mark = foreign_rule(100, 7, Some(TO_ZTUNNEL));
    assert_eq!(chosen(&with([same_mark])).0, 99);
    for harmless in [
        foreign_rule(32_765, 7, None),
        foreign_rule(52, LOCAL_TABLE, None),
        foreign_rule(52, 7, Some(Mark::new(0x200, 0xf00).unwrap())),
        foreign_rule(MAIN_RULE_PRIORITY, 7, None),
    ] {
        assert_eq!(chosen(&with([harmless])).0, RULE_PRIORITY);
    }
}

#[test]
fn a_priority_is_kept_until_a_foreign_rule_comes_before() {
    let mut routing = with([foreign_rule(300, 7, None)]);
    let item = own_item(&routing, RULE);
    add(&mut routing, item);
    assert_eq!(chosen(&routing).0, 299);
    add(&mut routing, foreign_rule(298, 8, None));
    assert_eq!(chosen(&routing).0, 297);
    routing.rules.retain(is_own);
    assert_eq!(chosen(&routing).0, 299);
}

#[test]
fn a_foreign_rule_of_priority_0_for_all_packets_is_in_the_way() {
    let routing = with([foreign_rule(0, 7, None)]);
    let error = routing.item(RULE).unwrap_err().to_string();
    assert!(error.contains("IPv4 ip rule `pref 0 lookup 7`"), "{error}");
    let mut narrow = routing;
    narrow.rules[0].rule.to = Some("10.0.0.1".parse().unwrap());
    assert_eq!(chosen(&narrow).0, 0);
}

#[test]
fn items_of_earlier_releases_are_inpods_and_not_wanted() {
    let needs = needed(Form::Ambient, &[Family::V4]);
    let route = Route {
        family: Family::V4,
        table: ISTIO_ZTUNNEL_TABLE,
        protocol: PROTOCOL,
        is_local: true,
        to: None,
        interface: LOOPBACK,
    };
    let rule = IpRule {
        priority: ISTIO_RULE_PRIORITY,
        table: ISTIO_ZTUNNEL_TABLE,
        ..rule_of(own_item(&Routing::default(), RULE))
    };
    let old = [Item::Rule(rule), Item::Route(route)];
    let routing = with(old.clone());
    assert_eq!(routing.own_items(false), old);
    let wanted = routing.items(&needs).unwrap();
    assert!(old.iter().all(|item| !wanted.contains(item)), "{wanted:?}");
    assert_eq!(routing.agent_items(), []);
}

#[test]
fn routing_of_istio_is_known_by_mark_table_and_priority() {
    let local = |table| {
        Item::Route(Route {
            family: Family::V4,
            table,
            protocol: FOREIGN,
            is_local: true,
            to: None,
            interface: LOOPBACK,
        })
    };
    let agent = [
        foreign_rule(ISTIO_RULE_PRIORITY, ISTIO_ZTUNNEL_TABLE, Some(TO_ZTUNNEL)),
        local(ISTIO_ZTUNNEL_TABLE),
    ];
    let mark = FROM_PROXY.whole();
    let sidecar = [
        foreign_rule(32_763, ISTIO_PROXY_TABLE, Some(mark)),
        local(ISTIO_PROXY_TABLE),
    ];
    let routing = with(agent.iter().chain(&sidecar).cloned());
    assert_eq!(routing.agent_items(), agent);
    assert_eq!(routing.sidecar_items(), sidecar);
    assert_eq!(routing.own_items(true), []);
    // A route alone may be anybody's.
    let alone = with([local(ISTIO_ZTUNNEL_TABLE), foreign_rule(7, 100, None)]);
    assert_eq!(alone.agent_items(), []);
}

#[test]
fn an_address_of_unknown_origin_is_ours_only_where_tables_use_it() {
    let mut routing = Routing {
        address: Some(0),
        ..Routing::default()
    };
    assert_eq!(routing.own_items(true), [Item::Address]);
    assert_eq!(routing.own_items(false), []);
    routing.reports_protocols = true;
    assert_eq!(routing.own_items(true), []);
    assert!(routing.has_foreign_address());
    routing.address = Some(PROTOCOL);
    assert_eq!(routing.own_items(false), [Item::Address]);
}
